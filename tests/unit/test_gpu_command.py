"""`python -m gpu`, which checks a GPU, rehearsed without one."""

import json
import os
import pathlib
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.metadata import version

import pytest

from gpu import report
from gpu import sources

TESTS = pathlib.Path(__file__).parents[1]


@pytest.mark.runs_on("torch")
def test_metadata_of_a_source_tree_is_that_of_an_installed_one(
    tmp_path, monkeypatch
):
    groups = ("keras_dist.backends", "keras_dist.coordinators")
    own = {
        (each.group, each.name, each.value)
        for group in groups
        for each in entry_points(group=group)
    }
    installed = version("keras-dist")
    sources.write_metadata(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert version("keras-dist") == installed
    assert own == {
        (each.group, each.name, each.value)
        for group in groups
        for each in entry_points(group=group)
    }


@pytest.mark.runs_on("torch")
@pytest.mark.only_on("torch", reason="Others take longer to compile the steps.")
def test_rehearsal(tmp_path):
    """The checks of the small model, from a source tree, with their report."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "gpu", "--rehearse", "--backend", "torch"),
            *("--json", str(tmp_path / "gpu.json")),
            *("--markdown", str(tmp_path / "gpu.md")),
            *("--", "-k", "mlp and central or pinned"),
        ],
        cwd=TESTS,
        env={k: v for k, v in os.environ.items() if k != "KERAS_BACKEND"},
        capture_output=True,
        check=False,
        text=True,
        timeout=400,
    )
    assert not done.returncode, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["is_rehearsal"]
    (own,) = found["backends"].values()
    assert own["session"]["backend"] == "torch"
    outcomes = [each["outcome"] for each in own["outcomes"]]
    assert outcomes.count("passed") == len(outcomes) > 1
    assert [each["name"] for each in own["left out"]] == ["pinned memory"]
    text = (tmp_path / "gpu.md").read_text()
    assert "| largest difference, central, mlp |" in text
    assert "- pinned memory: without CUDA there is none to pin" in text


@pytest.mark.runs_on("torch")
def test_report_shows_each_backend_and_what_failed():
    lines = [
        {"kind": "session", "versions": {"torch": "2"}},
        {"kind": "fact", "name": "a step", "value": 0.002, "unit": "s"},
        {
            "kind": "outcome",
            "test": "test_a.py::test_b",
            "outcome": "failed",
            "seconds": 1.0,
            "text": "assert x\nE  too slow",
        },
    ]
    gpu = {
        "name": "H",
        "bytes": 2**34,
        "driver": "9",
        "compute capability": "8.0",
    }
    machine = {"gpus": [gpu], "system": "Linux", "cores": 4, "python": "3"}
    text = report.markdown(
        report.content(machine, {"torch": lines, "jax": []}, False)
    )
    assert "H (16 GiB, driver 9, compute capability 8.0). Linux" in text
    assert "| Measured | PyTorch | JAX |" in text
    assert "| a step | 2.000 ms |  |" in text
    assert "- failed, 1 times, `test_a.py::test_b` first: E  too slow" in text

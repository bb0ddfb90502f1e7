"""`python -m gpu` can be rehearsed without a GPU, and reports what failed."""

import collections
import json
import os
import pathlib
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.metadata import version

import pytest

from gpu import sources

TESTS = pathlib.Path(__file__).parents[1]


@pytest.mark.runs_on("torch")
def test_metadata_of_a_source_tree_is_that_of_an_installed_one(
    tmp_path, monkeypatch
):
    def found():
        groups = ("keras_dist.backends", "keras_dist.coordinators")
        plugins = [
            each for group in groups for each in entry_points(group=group)
        ]
        own = {(each.group, each.name, each.value) for each in plugins}
        return version("keras-dist"), own

    installed = found()
    sources.write_metadata(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert found() == installed


@pytest.mark.runs_on("torch")
@pytest.mark.only_on("torch", reason="Others take longer to compile the steps.")
def test_rehearsal(tmp_path):
    """The checks of the small model, from a source tree, with their report."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "gpu", "--rehearse", "--backend", "torch"),
            *("--json", str(tmp_path / "gpu.json")),
            *("--markdown", str(tmp_path / "gpu.md")),
            *("--", "-k", "mlp and central or pinned or leave"),
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
    outcomes = collections.Counter(e["outcome"] for e in own["outcomes"])
    assert outcomes.pop("passed") > 1
    assert outcomes == {"skipped": 1}
    assert [each["name"] for each in own["left out"]] == ["pinned memory"]
    text = (tmp_path / "gpu.md").read_text()
    assert "| largest difference, central, mlp |" in text
    skipped = "test_central.py::test_gradients_leave_the_gpu_together"
    assert f"- skipped, 1 times, `{skipped}` first: Kinds of memory" in text
    assert "- pinned memory: without CUDA there is none to pin" in text

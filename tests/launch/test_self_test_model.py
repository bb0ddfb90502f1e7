"""`keras-dist test --model`: a user's model, compared with one device."""

import json
import os
import subprocess
import sys

import keras
import pytest

from keras_dist.cli.trial import Settings
from keras_dist.cli.trial import rows_for
from keras_dist.environment.packages import InstalledBackend
from keras_dist.errors import see_section

pytestmark = pytest.mark.runs_on("torch")

BACKEND = keras.backend.backend()
MODULE = """
import keras
import numpy as np
import keras_dist

def make():
    several = keras_dist.get_strategy().num_replicas_in_sync > 1
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mae" if several else "mse")
    return model, np.eye(12, 3, dtype="float32"), np.ones((12, 1))
"""


def _run(folder, *arguments):
    path = folder / "results.json"
    process = subprocess.run(
        [sys.executable, "-m", "keras_dist.cli", "test"]
        + ["--backend", BACKEND, "--devices", "2", "--timeout", "240"]
        + ["--json", str(path), *arguments],
        cwd=folder,
        env=os.environ | {"COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    found = json.loads(path.read_text())["results"]
    return process, {each["name"].partition(",")[0]: each for each in found}


def test_where_numbers_differ_it_says_what_and_ends_with_1(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    process, results = _run(tmp_path, "--model", "mine:make")
    assert process.returncode == 1, process.stdout + process.stderr
    assert results["one device"]["status"] == "passed"
    assert results["one device"]["details"].startswith("same: ")
    assert results["one device"]["report"]["same"] is True
    for name in ("mirrored", "central storage"):
        assert results[name]["status"] == "failed"
        first = results[name]["report"]["first"]
        assert (first["kind"], first["name"]) == ("loss", "loss")
    printed = " ".join(process.stdout.split())
    assert see_section("The numbers differ") in printed


def test_a_function_that_is_not_there_is_named(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    process, results = _run(tmp_path, "--model", "mine:other")
    assert process.returncode == 1
    told = results["one device"]["details"]
    assert "the module has no attribute 'other'" in told
    assert results["one device"]["fix"] == "do what the message says"


def test_each_way_is_tried_with_the_users_model():
    seen = {
        "devices": ["cpu:0", "gpu:0", "gpu:1"],
        "shards_optimizer": True,
        "shards_variables": True,
    }
    settings = Settings(workers=2, devices=2, model="mine:make")
    rows = rows_for(
        InstalledBackend("there", "there:Backend", "1"), seen, settings
    )
    assert [(row.name, row.job) for row in rows] == [
        ("one device, cpu:0", "verify"),
        ("mirrored, cpu:0-1", "verify"),
        ("central storage, cpu:0-1", "verify"),
        ("sharded optimizer, cpu:0-1", "verify"),
        ("sharded variables, cpu:0-1", "verify"),
        ("mirrored, gpu:0-1", "verify"),
        ("2 workers", "verify workers"),
    ]
    assert all(row.arguments["model"] == "mine:make" for row in rows)

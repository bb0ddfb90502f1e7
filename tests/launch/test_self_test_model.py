"""`keras-dist test --model`: a user's model, compared with one device."""

import json
import os
import subprocess
import sys

import keras
import pytest

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


def test_where_numbers_differ_it_says_what_and_ends_with_1(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    path = tmp_path / "results.json"
    process = subprocess.run(
        [sys.executable, "-m", "keras_dist.cli", "test"]
        + ["--backend", BACKEND, "--devices", "2", "--timeout", "240"]
        + ["--json", str(path), "--model", "mine:make"],
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    found = json.loads(path.read_text())["results"]
    results = {each["name"].partition(",")[0]: each for each in found}
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

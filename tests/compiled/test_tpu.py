"""Compilers of accelerators, which run without any, see a sharded state."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import keras
import pytest

pytestmark = [
    pytest.mark.skipif(
        keras.backend.backend() != "jax", reason="JAX compiles for TPUs."
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="The TPU's compiler is in the package 'libtpu'.",
    ),
]
COUNT = 4


def train_step(kind, num_layers):
    """Counts of the train step's program for four TPUs."""
    script = pathlib.Path(__file__).with_name("train_step.py")
    run = subprocess.run(
        [sys.executable, str(script), kind, str(num_layers)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_each_device_has_its_part_of_the_state_and_no_state_is_sent():
    sharded, mirrored = train_step("sharded", 2), train_step("mirrored", 2)
    saved = mirrored["state"] - sharded["state"]
    slots = 2 * sharded["variables"]
    assert saved == pytest.approx(slots * (COUNT - 1) / COUNT, rel=0.02)
    # At most one for each variable: two slots each would be more.
    assert sharded["collectives"]["all-gather"] <= 4
    assert "all-gather" not in mirrored["collectives"]

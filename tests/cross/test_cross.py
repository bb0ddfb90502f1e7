"""Equality between the backends, and one framework's data on another."""

import functools
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from parity.harness import BACKENDS
from parity.harness import assert_same

SCRIPT = pathlib.Path(__file__).with_name("train.py")
NEEDED = ("jax", "tensorflow", "torch", "grain")

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in NEEDED),
    reason="Needs all three frameworks in one environment.",
)


@functools.cache
def numbers(backend):
    """What `train.py` wrote down on a backend."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "numbers.npz")
        environment = os.environ | {
            "KERAS_BACKEND": backend,
            "KERAS_DIST_VIRTUAL_DEVICES": "4",
        }
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(path)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        with np.load(path) as loaded:
            return dict(loaded)


def _part(backend, prefix):
    return {
        name.removeprefix(prefix): value
        for name, value in numbers(backend).items()
        if name.startswith(prefix)
    }


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_same_numbers_as_jax(backend):
    """From the same initial weights and batches, on three replicas."""
    expected = _part("jax", "case|")
    actual = _part(backend, "case|")
    if backend == "tensorflow":
        # Keras on TensorFlow weighs the batches of an output's own loss
        # alike, elsewhere by their rows. One device or several, it is so.
        for name in [n for n in actual if _is_loss_of_an_output(n)]:
            del actual[name], expected[name]
    assert_same(actual, expected, rtol=1e-4, atol=1e-5)


def _is_loss_of_an_output(name):
    return name.startswith("two_headed|") and "_loss" in name.replace(
        "/val_loss", ""
    )


@pytest.mark.parametrize("kind", ["tf_data", "torch_loader", "grain_map"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_data_of_another_framework(backend, kind):
    """A torch DataLoader on JAX, a tf.data.Dataset on torch, and so on."""
    plain = _part(backend, f"kind|{kind}|None|")
    assert plain
    actual = _part(backend, f"kind|{kind}|3|")
    if (backend, kind) == ("tensorflow", "grain_map"):
        # Where the length is not known, plain Keras on TensorFlow also counts
        # the step that finds no data: a race in its graph.
        assert actual.pop("optimizer/0") == 6 <= plain.pop("optimizer/0")
    assert_same(actual, plain)


def test_same_data_of_any_framework():
    """A seeded source gives the same training wherever it is read.

    Not one that is shuffled anew when it is read again: to build a model,
    Keras reads a batch beforehand on JAX and PyTorch, but not on TensorFlow.
    """
    expected = _part("jax", "kind|grain_map|3|")
    for backend in BACKENDS[1:]:
        actual = _part(backend, "kind|grain_map|3|")
        assert_same(actual, expected, rtol=1e-4, atol=1e-5)

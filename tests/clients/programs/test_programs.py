"""Programs like keras.io's examples have the numbers of one device."""

import importlib
import importlib.util
import pathlib

import pytest

from clients.programs import harness

_HELPERS = {"__init__", "harness", "steps"}
PROGRAMS = sorted(
    path.stem
    for path in pathlib.Path(__file__).parent.glob("*.py")
    if path.stem not in _HELPERS and not path.stem.startswith("test_")
)

HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None


def _programs():
    """Each on 2 or 3 replicas; in CI on PyTorch, and some on another one."""
    others = {0: ["jax"], 3: ["tensorflow"]}
    for index, name in enumerate(PROGRAMS):
        mark = pytest.mark.runs_on("torch", *others.get(index % 5, ()))
        yield pytest.param(name, 2 + index % 2, marks=mark)


@pytest.mark.parametrize(("name", "num_replicas"), list(_programs()))
def test_numbers_of_one_device(name, num_replicas):
    program = importlib.import_module(f"clients.programs.{name}")
    if getattr(program, "NEEDS_TENSORFLOW", False) and not HAS_TENSORFLOW:
        pytest.skip("Keras' layers that look up text need TensorFlow.")
    harness.assert_same_as_one_device(program, num_replicas)

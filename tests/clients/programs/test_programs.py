"""Programs in the manner of keras.io's examples: the numbers of one device."""

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

# One compilation for each program is enough where there is one.
COUNTS = {
    name: (2, 3) if harness.BACKEND == "torch" else (2 + index % 2,)
    for index, name in enumerate(PROGRAMS)
}


@pytest.mark.parametrize(
    ("name", "num_replicas"),
    [(name, count) for name in PROGRAMS for count in COUNTS[name]],
)
def test_numbers_of_one_device(name, num_replicas):
    program = importlib.import_module(f"clients.programs.{name}")
    if getattr(program, "NEEDS_TENSORFLOW", False) and not HAS_TENSORFLOW:
        pytest.skip("Keras' layers that look up text need TensorFlow.")
    harness.assert_same_as_one_device(program, num_replicas)

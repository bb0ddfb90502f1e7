"""`fit` gives one device's numbers where replicas have two logical devices."""

import functools
import math

import pytest

import keras_dist
from keras_dist.core.variable_layouts import VariableLayouts
from parity import cases
from parity.harness import BACKEND
from parity.harness import assert_same
from parity.harness import devices
from parity.harness import plain
from parity.harness import train

pytestmark = pytest.mark.only_on(
    "jax", reason="Replicas have one device on the others."
)
CASES = [case for case in cases.CASES if BACKEND in case.backends]


def divided(num_replicas, variables="mirrored"):
    return keras_dist.MirroredStrategy(
        devices(2 * num_replicas), logical_devices=2, variables=variables
    )


def last_even_axis(layouts, path, shape):
    """The axes of a variable of which two devices can divide one."""
    even = [axis for axis, size in enumerate(shape) if size % 2 == 0]
    if not even or math.prod(shape) < 2 or "seed" in path:
        return ()
    return (*[None] * even[-1], "logical")


@pytest.fixture
def all_are_divided(monkeypatch):
    """Divides the last axis of each variable that two devices can divide."""
    found = []

    def axes_of(self, path, shape):
        found.append(last_even_axis(self, path, shape))
        return found[-1]

    monkeypatch.setattr(VariableLayouts, "axes_of", axes_of)
    yield
    assert any(found)


@pytest.mark.usefixtures("all_are_divided")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_same_numbers(case):
    """On two replicas, whose shares of a batch are unequal."""
    assert_same(train(case, 2, divided), plain(case), case.rtol)


@pytest.mark.usefixtures("all_are_divided", "all_are_large")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_same_numbers_where_replicas_divide_the_rest(case):
    make = functools.partial(divided, variables="sharded")
    assert_same(train(case, 2, make), plain(case), case.rtol)

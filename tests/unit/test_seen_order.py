"""Batches in another order are told from batches that are rounded otherwise."""

import numpy as np
import pytest

from keras_dist.errors import ReplicaDivergenceError
from keras_dist.fit.workers.same_data import SeenOrder
from keras_dist.fit.workers.same_data import check_order

BATCHES = 1000


def numbers_of(order, rounding=0.0, dtype="float32"):
    """What a worker tells of batches that it has read in an order."""
    rng = np.random.default_rng(0)
    batches = rng.normal(size=(BATCHES, 2, 3)).astype(dtype)
    errors = 1 + rounding * rng.uniform(-1, 1, batches.shape)
    if rounding:
        batches = (batches * errors).astype(dtype)
    seen = SeenOrder()
    list(seen.noted([(batches[i], None) for i in order]))
    return [0, *SeenOrder.joined([seen])]


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_two_batches_that_have_changed_places(dtype):
    order = np.arange(BATCHES)
    swapped = order.copy()
    swapped[[3, 700]] = order[[700, 3]]
    if dtype == "int64":
        swapped = np.roll(order, 1)  # many of the batches are zeros
    first, other = (numbers_of(o, dtype=dtype) for o in (order, swapped))
    check_order([first, first])
    with pytest.raises(ReplicaDivergenceError, match="on worker 1 than"):
        check_order([first, other])


def test_other_hardware_rounds_otherwise():
    order = range(BATCHES)
    check_order([numbers_of(order), numbers_of(order, rounding=2e-7)])


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e308, 0.0])
def test_values_that_are_no_usual_numbers(value):
    seen = SeenOrder()
    list(seen.noted([np.full((2, 3), value)]))
    check_order([[0, *SeenOrder.joined([seen])]] * 2)

"""Variables that are looked up by constant indices, as many as rows.

On TensorFlow, a gradient has a row for each index. Where nobody can tell
whether a constant has one for each row of the batch, a warning says so.
"""

import contextlib

import keras
import numpy as np
import pytest
from keras import layers
from keras import ops

from parity.harness import BACKEND
from parity.harness import assert_same
from parity.harness import central
from parity.harness import compiled
from parity.harness import state_of

ROWS = 4  # of a replica
WIDTH = 3


class Segments(keras.Model):
    """Adds the mean of what constant indices look up to each row."""

    def __init__(self, indices, is_made_before):
        super().__init__()
        self.table = layers.Embedding(3, WIDTH)
        self.head = layers.Dense(1)
        self.make = indices
        self.made = indices() if is_made_before else None

    def call(self, x):
        indices = self.make() if self.made is None else self.made
        looked_up = ops.mean(self.table(indices), axis=0)
        return self.head(ops.tanh(x + looked_up))


def zeros():
    return ops.zeros((ROWS,), "int32")


def trained(indices, is_made_before, rows, eager, num_replicas, make=None):
    """What `train_on_batch`, whose batches are of known size, leaves."""
    x = np.random.default_rng(0).normal(size=(rows, WIDTH)).astype("float32")

    def build():
        model = Segments(indices, is_made_before)
        model(x[:2])
        return model

    options = {"eager": eager, "jit_compile": False}
    model = compiled(num_replicas, build, adam, make, **options)
    for _ in range(3):
        model.train_on_batch(x, x[:, :1])
    return state_of(model)


def adam():
    return keras.optimizers.Adam(0.05)


makes = pytest.mark.parametrize(
    "make", [None, central], ids=["mirrored", "central"]
)


# The warning is an error, as each is in these tests.
@makes
@pytest.mark.parametrize(
    ("indices", "is_made_before", "rows"),
    [
        pytest.param(zeros, True, 2 * ROWS, id="made before"),
        pytest.param(zeros, False, 2 * ROWS - 1, id="uneven shares"),
        pytest.param(lambda: ops.arange(ROWS) // 2, False, 2 * ROWS, id="more"),
    ],
)
@pytest.mark.parametrize("eager", [False, True])
def test_one_device_has_them_once(indices, is_made_before, rows, eager, make):
    case = indices, is_made_before, rows, eager
    assert_same(trained(*case, 2, make), trained(*case, None))


@makes
def test_a_step_that_is_traced_for_any_batch_has_them_once(make):
    case = zeros, False, 2 * ROWS, False
    assert_same(trained(*case, 2, make), trained(*case, None))


@makes
def test_a_warning_names_the_variable(make):
    says = contextlib.nullcontext()
    if BACKEND == "tensorflow":
        says = pytest.warns(UserWarning, match="/embeddings' is looked up by 4")
    with says:
        trained(zeros, False, 2 * ROWS, True, 2, make)

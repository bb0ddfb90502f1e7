"""Variables that are looked up by indices have one device's numbers.

On TensorFlow, their gradients have a row for each index, and optimizers square
each row: it matters how many rows there are of one index. Indices may come
from the batch, or not, as those of positions don't.
"""

import keras
import numpy as np
import pytest
from keras import layers
from keras import ops
from keras import optimizers

from parity.harness import BACKEND
from parity.harness import Case
from parity.harness import assert_same
from parity.harness import central
from parity.harness import compiled
from parity.harness import plain
from parity.harness import state_of
from parity.harness import train

LENGTH = 4
WIDTH = 3
WORDS = 6
RELATIVE = np.abs(np.subtract.outer(np.arange(LENGTH), np.arange(LENGTH)))


class Lookups(keras.Model):
    """Looks variables up in each way that one row or all rows can."""

    def __init__(self):
        super().__init__()
        names = (
            "tokens positions one_row zeros filled repeated both tied buffered"
        )
        for name in names.split():
            setattr(self, name, layers.Embedding(WORDS, WIDTH))
        self.relative = self.add_weight(shape=(LENGTH, WIDTH), name="relative")
        self.buffer = self.add_weight(
            shape=(LENGTH,), dtype="int32", trainable=False, name="buffer"
        )
        self.head = layers.Dense(2)

    def call(self, x):
        rows, length = ops.shape(x)
        positions = ops.arange(length)
        h = self.tokens(x) + self.positions(positions)
        h += self.one_row(ops.expand_dims(positions, 0))
        h += self.zeros(ops.zeros_like(x))
        h += self.filled(ops.full((rows, length), 2))
        h += self.repeated(ops.broadcast_to(positions, (rows, length)))
        h += self.both(x) * self.both(positions + 1)
        h += ops.mean(ops.take(self.relative, RELATIVE, axis=0), axis=1)
        h += self.buffered(self.buffer) + self.tied(x)
        scores = ops.matmul(h, ops.transpose(self.tied.embeddings))
        h = ops.tanh(h) + ops.matmul(ops.softmax(scores), self.tied.embeddings)
        return self.head(ops.mean(h, axis=1))


def lookups():
    model = Lookups()
    model(np.zeros((2, LENGTH), "int32"))
    return model


def tokens(rows):
    rng = np.random.default_rng(0)
    return {
        "x": rng.integers(0, WORDS, (rows, LENGTH)),
        "y": rng.normal(size=(rows, 2)).astype("float32"),
    }


OPTIMIZERS = {
    "adam": lambda: optimizers.Adam(0.05),
    "rmsprop": lambda: optimizers.RMSprop(0.05),
    "adagrad": lambda: optimizers.Adagrad(0.05),
    "momentum": lambda: optimizers.SGD(0.05, momentum=0.9),
    "lion": lambda: optimizers.Lion(0.01),
    "clipnorm": lambda: optimizers.Adam(0.05, clipnorm=0.1),
    "global_clipnorm": lambda: optimizers.SGD(0.1, global_clipnorm=0.2),
    "clipvalue": lambda: optimizers.SGD(0.1, clipvalue=0.01),
    "average": lambda: optimizers.AdamW(
        0.05, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=3
    ),
    "scaled": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(0.05), initial_scale=64.0
    ),
}


def case_of(name, eager=False, **kwargs):
    # Of seven rows, replicas have three and four.
    return Case(
        f"{name}-{eager}-{kwargs}",
        lookups,
        tokens,
        lambda: {
            "optimizer": OPTIMIZERS[name](),
            "loss": "mse",
            "run_eagerly": eager,
        },
        **kwargs,
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fit(name):
    case = case_of(name)
    assert_same(train(case, 2), plain(case))


# The rows' own `zeros_like` is constant there, once TensorFlow knows its shape.
@pytest.mark.filterwarnings("ignore:Variable .* is looked up by:UserWarning")
@pytest.mark.parametrize("make", [None, central], ids=["mirrored", "central"])
@pytest.mark.parametrize(
    ("num_replicas", "case"),
    [
        (3, case_of("adam")),
        # Each replica has as many rows as there are positions.
        (2, case_of("rmsprop", rows=16, batch_size=2 * LENGTH)),
        (2, case_of("adagrad", True, rows=14)),
        # Of 3 rows, a replica has one.
        (2, case_of("adagrad", True, rows=6, batch_size=3)),
        (2, case_of("adagrad", True, rows=16, batch_size=2 * LENGTH)),
    ],
)
def test_shares_of_each_kind(num_replicas, case, make):
    assert_same(train(case, num_replicas, make), plain(case))


@pytest.mark.parametrize("eager", [False, True])
def test_rows_that_are_equal_by_chance(eager):
    """Each replica looks up the same ids, of its own rows all the same."""
    ids = np.array([[1], [2], [1], [2]], "int32")
    y = np.float32([[1], [0], [0], [1]])

    def build():
        return keras.Sequential(
            [
                keras.Input((1,), dtype="int32"),
                layers.Embedding(4, 3),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )

    def outcome(count):
        model = compiled(count, build, OPTIMIZERS["adam"], eager=eager)
        for _ in range(3):
            model.train_on_batch(ids, y)
        return state_of(model)

    assert_same(outcome(2), outcome(None))


def sparse_rows(rows):
    """Rows of a sparse matrix, as native tensors; some rows are empty."""
    rng = np.random.default_rng(1)
    dense = rng.normal(size=(rows, WORDS)) * (rng.random((rows, WORDS)) < 0.3)
    dense = dense.astype("float32")
    y = rng.normal(size=(rows, 2)).astype("float32")
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return {"x": tf.sparse.from_dense(dense), "y": y}
    from jax.experimental import sparse

    return {"x": sparse.BCOO.fromdense(dense), "y": y}


def sparse_model():
    return keras.Sequential(
        [keras.Input((WORDS,), sparse=True), layers.Dense(2)]
    )


def sparse_case_of(name, eager=False):
    return Case(
        f"sparse-{name}-{eager}",
        sparse_model,
        sparse_rows,
        lambda: {
            "optimizer": OPTIMIZERS[name](),
            "loss": "mse",
            "run_eagerly": eager,
            # JAX can't differentiate Keras' own jitted sparse layers.
            "jit_compile": False,
        },
    )


@pytest.mark.only_on("jax", "tensorflow", reason="Keras has no sparse tensors")
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("adam", marks=pytest.mark.runs_on("jax")),
        pytest.param("adagrad", marks=pytest.mark.runs_on("tensorflow")),
        pytest.param("clipnorm", marks=pytest.mark.runs_on("tensorflow")),
    ],
)
def test_sparse_inputs(name, eager):
    case = sparse_case_of(name, eager)
    for make in (None, central):
        assert_same(train(case, 2, make), plain(case))


# What `tests/workers/test_lookups.py` trains.
OVER_WORKERS = {
    "adam": case_of("adam"),
    "clipnorm": case_of("clipnorm", rows=16, batch_size=4 * LENGTH),
    "eager": case_of("adagrad", True),
}
if BACKEND == "tensorflow":
    OVER_WORKERS["sparse"] = sparse_case_of("adagrad")

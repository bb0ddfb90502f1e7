"""Every built-in loss trains as on one device, each on an output of a model."""

import inspect

import keras
import numpy as np
import pytest
from keras import layers
from keras import losses

from parity import models
from parity.harness import BACKEND
from parity.harness import assert_same
from parity.harness import compiled
from parity.harness import fitted

ROWS, BATCH_SIZE, CLASSES = 21, 7, 4
REAL, POSITIVE, SIGNS, ONE_HOT, SPARSE, LABELS = range(6)

# The kind of output and target that each takes.
TABLE = {
    "MeanSquaredError": REAL,
    "MeanAbsoluteError": REAL,
    "MeanAbsolutePercentageError": POSITIVE,
    "MeanSquaredLogarithmicError": POSITIVE,
    "Huber": REAL,
    "LogCosh": REAL,
    "CosineSimilarity": REAL,
    "KLDivergence": POSITIVE,
    "Poisson": POSITIVE,
    "BinaryCrossentropy": SIGNS,
    "BinaryFocalCrossentropy": SIGNS,
    "Hinge": SIGNS,
    "SquaredHinge": SIGNS,
    "CategoricalCrossentropy": ONE_HOT,
    "CategoricalFocalCrossentropy": ONE_HOT,
    "CategoricalGeneralizedCrossEntropy": LABELS,
    "CategoricalHinge": ONE_HOT,
    "Dice": ONE_HOT,
    "Tversky": ONE_HOT,
    "SparseCategoricalCrossentropy": SPARSE,
}
# From Keras 3.16.
if hasattr(losses, "SparseCategoricalFocalCrossentropy"):
    TABLE["SparseCategoricalFocalCrossentropy"] = SPARSE
# `test_fit.py` has a case for the first; the second is below.
ELSEWHERE = {"Circle", "CTC"}


def test_the_table_has_every_loss():
    known = {
        name
        for name, value in vars(losses).items()
        if inspect.isclass(value) and issubclass(value, losses.Loss)
    }
    assert set(TABLE) | ELSEWHERE == known - {"Loss"}


def _head(kind, name):
    units, activation = {
        REAL: (3, "linear"),
        POSITIVE: (3, "softplus"),
        SIGNS: (1, "sigmoid"),
    }.get(kind, (CLASSES, "softmax"))
    return layers.Dense(units, activation=activation, name=name)


def _target(kind, rng):
    labels = rng.integers(0, CLASSES, (ROWS, 1))
    return {
        REAL: rng.normal(size=(ROWS, 3)).astype("float32"),
        POSITIVE: rng.uniform(0.1, 2, (ROWS, 3)).astype("float32"),
        SIGNS: rng.integers(0, 2, (ROWS, 1)).astype("float32"),
        ONE_HOT: np.eye(CLASSES, dtype="float32")[labels[:, 0]],
        SPARSE: labels,
        LABELS: labels[:, 0],
    }[kind]


def _assert_trains_alike(count, build, loss, y, weights=None, shape=(6,)):
    x = np.random.default_rng(0).normal(size=(ROWS, *shape)).astype("float32")

    def outcome(count):
        model = compiled(count, build, loss=loss)
        options = {"batch_size": BATCH_SIZE, "shuffle": False, "verbose": 0}
        return fitted(model, x, y, sample_weight=weights, **options)

    assert_same(outcome(count), outcome(None))


@pytest.mark.parametrize(
    ("num_replicas", "weighted"),
    # The step takes long to compile: once is enough where it is.
    [(3, True), *([(2, False)] if BACKEND == "torch" else [])],
)
def test_every_loss(num_replicas, weighted):
    rng = np.random.default_rng(1)
    y = {name: _target(kind, rng) for name, kind in TABLE.items()}
    weights = {
        name: rng.uniform(0, 2, ROWS).astype("float32") for name in TABLE
    }

    def build():
        inputs = layers.Input((6,))
        hidden = layers.Dense(5, activation="tanh")(inputs)
        heads = {n: _head(kind, n)(hidden) for n, kind in TABLE.items()}
        return keras.Model(inputs, heads)

    made = {name: getattr(losses, name)() for name in TABLE}
    weights = weights if weighted else None
    _assert_trains_alike(num_replicas, build, made, y, weights)


IGNORING = [
    name
    for name in TABLE
    if "ignore_class" in inspect.signature(getattr(losses, name)).parameters
]


@pytest.mark.parametrize("name", IGNORING)
@pytest.mark.parametrize("weighted", [False, True])
def test_classes_that_are_ignored(name, weighted):
    """The divisor counts the other rows, of which each replica has some."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, CLASSES, ROWS)
    labels[: BATCH_SIZE // 2] = 0
    weights = rng.uniform(0, 2, ROWS).astype("float32") if weighted else None
    build = models.sequence(
        models.dense(CLASSES, activation="softmax"), inputs=(6,)
    )
    loss = getattr(losses, name)(ignore_class=0)
    _assert_trains_alike(3, build, loss, labels, weights)


def test_ctc():
    y = np.random.default_rng(1).integers(1, CLASSES, (ROWS, 2))
    build = models.sequence(models.dense(CLASSES), inputs=(5, 3))
    _assert_trains_alike(3, build, losses.CTC(), y, shape=(5, 3))


def test_a_loss_function_may_return_a_number():
    model = compiled(2, models.mlp, loss=lambda y_true, y_pred: 3)
    assert model.evaluate(**models.table(4), verbose=0) == 3.0

"""Every built-in loss, each on an output of one model."""

import inspect

import keras
import numpy as np
import pytest
from keras import layers
from keras import losses

from parity.harness import BACKEND
from parity.harness import JIT
from parity.harness import assert_same
from parity.harness import fitted
from parity.harness import scope
from parity.harness import set_initial_weights

ROWS, BATCH_SIZE, CLASSES, STEPS = 21, 7, 4, 5
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
        ONE_HOT: (CLASSES, "softmax"),
        SPARSE: (CLASSES, "softmax"),
        LABELS: (CLASSES, "softmax"),
    }[kind]
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


def _trained(model, x, y, weights=None):
    """The history of one epoch of `fit`, and the state after it."""
    return fitted(
        model,
        x,
        y,
        sample_weight=weights,
        batch_size=BATCH_SIZE,
        shuffle=False,
        verbose=0,
    )


@pytest.mark.parametrize(
    ("num_replicas", "weighted"),
    # The step takes long to compile: once is enough where it is.
    [(3, True), *([(2, False)] if BACKEND == "torch" else [])],
)
def test_every_loss(num_replicas, weighted):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 6)).astype("float32")
    y = {name: _target(kind, rng) for name, kind in TABLE.items()}
    weights = {
        name: rng.uniform(0, 2, ROWS).astype("float32") for name in TABLE
    }

    def outcome(count):
        with scope(count):
            inputs = layers.Input((6,))
            hidden = layers.Dense(5, activation="tanh")(inputs)
            heads = {n: _head(kind, n)(hidden) for n, kind in TABLE.items()}
            model = set_initial_weights(keras.Model(inputs, heads))
            model.compile(
                "sgd",
                {name: getattr(losses, name)() for name in TABLE},
                jit_compile=JIT,
            )
        return _trained(model, x, y, weights if weighted else None)

    assert_same(outcome(num_replicas), outcome(None))


IGNORING = [
    name
    for name in TABLE
    if "ignore_class" in inspect.signature(getattr(losses, name)).parameters
]


@pytest.mark.parametrize("name", IGNORING)
@pytest.mark.parametrize("weighted", [False, True])
def test_classes_that_are_ignored(name, weighted):
    """The divisor counts the other rows, of which each replica has some."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 6)).astype("float32")
    labels = rng.integers(0, CLASSES, ROWS)
    labels[: BATCH_SIZE // 2] = 0
    weights = rng.uniform(0, 2, ROWS).astype("float32")

    def outcome(count):
        with scope(count):
            model = keras.Sequential(
                [layers.Input((6,)), layers.Dense(CLASSES, "softmax")]
            )
            set_initial_weights(model).compile(
                "sgd", getattr(losses, name)(ignore_class=0), jit_compile=JIT
            )
        return _trained(model, x, labels, weights if weighted else None)

    assert_same(outcome(3), outcome(None))


def test_ctc():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, STEPS, 3)).astype("float32")
    y = rng.integers(1, CLASSES, (ROWS, 2))

    def outcome(count):
        with scope(count):
            model = keras.Sequential(
                [layers.Input((STEPS, 3)), layers.Dense(CLASSES)]
            )
            set_initial_weights(model).compile(
                "sgd", losses.CTC(), jit_compile=JIT
            )
        return _trained(model, x, y)

    assert_same(outcome(3), outcome(None))


def test_a_loss_function_may_return_a_number():
    with scope(2):
        model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile("sgd", lambda y_true, y_pred: 3, jit_compile=False)
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    loss = model.evaluate(x, y, batch_size=4, verbose=0)
    assert loss == 3.0

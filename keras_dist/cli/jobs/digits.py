"""The model of `demo`, and of `test` and `bench` unless they are told another.

It includes what fails first: a last batch that does not divide, statistics of
the whole batch, clipping by the norm of all gradients, a metric.
"""

import importlib.util

import keras
import numpy as np
from numpy.typing import NDArray

# Rows of each batch. No number of replicas from 2 divides both.
BATCHES = (20, 7)
NUM_FEATURES = 64
NUM_CLASSES = 10
SEED = 7
# Rows for `keras-dist bench`.
_NUM_ROWS = 1024

Array = NDArray[np.float32]


def make() -> tuple[keras.Model, list[tuple[Array, Array]]]:
    """Returns a compiled model and its batches, as `--model` takes them."""
    return model(), data()


def model() -> keras.Model:
    """Returns a compiled net whose numbers depend on the whole batch."""
    # Smooth activations: at the kink of a ReLU, a difference in the last digit
    # turns a gradient on or off, and two correct trainings diverge.
    made = keras.Sequential(
        [
            keras.Input((NUM_FEATURES,)),
            keras.layers.Dense(32, use_bias=False, name="hidden"),
            keras.layers.BatchNormalization(momentum=0.9, name="norm"),
            keras.layers.Activation("silu"),
            keras.layers.Dense(NUM_CLASSES, name="logits"),
        ],
        name="digits",
    )
    made.compile(
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return made


def make_with_arrays() -> tuple[keras.Model, Array, Array]:
    """Returns a compiled model and its rows, as `bench --model` takes them."""
    return model(), *rows(_NUM_ROWS)


def data() -> list[tuple[Array, Array]]:
    """Returns a pair of features and classes for each of `BATCHES`."""
    splits = np.cumsum(BATCHES[:-1])
    arrays = rows(sum(BATCHES))
    return list(zip(*(np.split(a, splits) for a in arrays), strict=True))


def rows(count: int) -> tuple[Array, Array]:
    """Returns digits of scikit-learn if it is installed, else made-up ones."""
    if importlib.util.find_spec("sklearn") is not None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        x, y = digits.data[:count] / 16.0, digits.target[:count]
    else:
        rng = np.random.default_rng(SEED)
        y = rng.integers(NUM_CLASSES, size=count)
        centers = rng.uniform(size=(NUM_CLASSES, NUM_FEATURES))
        x = centers[y] + rng.normal(0.0, 0.1, (count, NUM_FEATURES))
    return x.astype("float32"), y.astype("float32")

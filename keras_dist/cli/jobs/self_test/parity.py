"""A small training, under a strategy and with plain Keras.

It includes what fails first: a last batch that does not divide, statistics of
the whole batch, clipping by the norm of all gradients, a metric.
"""

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from keras_dist.strategies.central_storage import CentralStorageStrategy
from keras_dist.strategies.mirrored import MirroredStrategy
from keras_dist.strategies.one_device import OneDeviceStrategy
from keras_dist.strategies.strategy import Strategy

NUM_ROWS = 107
BATCH_SIZE = 20
NUM_FEATURES = 64
NUM_CLASSES = 10
SEED = 7

Array = NDArray[np.float32]


class DifferentNumbersError(Exception):
    """Raised when a strategy gives other numbers than one device."""


@dataclass(frozen=True)
class ParityOutcome:
    """The weights and the epoch's logs after a training."""

    weights: list[Array]
    logs: dict[str, float]


def data() -> tuple[Array, Array]:
    """Returns digits of scikit-learn if it is installed, else made-up ones.

    The arrays have the shapes `(NUM_ROWS, NUM_FEATURES)` and `(NUM_ROWS,)`.
    """
    if importlib.util.find_spec("sklearn") is not None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        x, y = digits.data[:NUM_ROWS] / 16.0, digits.target[:NUM_ROWS]
    else:
        rng = np.random.default_rng(SEED)
        y = rng.integers(NUM_CLASSES, size=NUM_ROWS)
        centers = rng.uniform(size=(NUM_CLASSES, NUM_FEATURES))
        x = centers[y] + rng.normal(0.0, 0.1, (NUM_ROWS, NUM_FEATURES))
    return x.astype("float32"), y.astype("float32")


def build_model() -> keras.Model:
    """Returns a compiled model with smooth activations.

    At the kink of a ReLU, the last digit turns a gradient on or off.
    """
    keras.utils.set_random_seed(SEED)
    model = keras.Sequential(
        [
            keras.Input((NUM_FEATURES,)),
            keras.layers.Dense(32, use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.Activation("silu"),
            keras.layers.Dense(NUM_CLASSES),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(model: keras.Model, initial: Sequence[Array]) -> ParityOutcome:
    """Fits a model for one epoch, from the weights `initial` on."""
    model.set_weights(list(initial))
    x, y = data()
    history = model.fit(
        x, y, batch_size=BATCH_SIZE, epochs=1, shuffle=False, verbose=0
    ).history
    logs = {name: float(values[-1]) for name, values in history.items()}
    return ParityOutcome(model.get_weights(), logs)


@functools.cache
def initial_weights() -> list[Array]:
    """Returns the weights that every model starts with."""
    weights: list[Array] = build_model().get_weights()
    return weights


@functools.cache
def plain() -> ParityOutcome:
    """Returns the outcome with plain Keras."""
    return train(build_model(), initial_weights())


def check_same(outcome: ParityOutcome, tolerance: float) -> str:
    """Compares an outcome with that of plain Keras, and describes the result.

    Raises:
        DifferentNumbersError: If anything differs by more than `tolerance`.
    """
    expected = plain()
    weights = max(
        float(np.max(np.abs(own - other)))
        for own, other in zip(outcome.weights, expected.weights, strict=True)
    )
    logs = max(
        abs(outcome.logs[name] - value) for name, value in expected.logs.items()
    )
    # A comparison with NaN is false, so weights that blew up fail.
    if weights <= tolerance and logs <= tolerance:
        return f"weights within {weights:.0e}" if weights else "equal weights"
    raise DifferentNumbersError(
        f"weights differ by {weights:.1e} from plain Keras on one device, loss "
        f"and metrics by {logs:.1e}. Expected: at most {tolerance:.0e}."
    )


def make_strategy(kind: str, devices: Sequence[str]) -> Strategy:
    """Returns a strategy on these devices.

    `kind` is `"one"`, `"mirrored"`, `"sharded"` or `"central"`.
    """
    if kind == "one":
        return OneDeviceStrategy(devices[0])
    if kind == "central":
        return CentralStorageStrategy(devices)
    return MirroredStrategy(devices, optimizer_state=kind)


def compare(kind: str, devices: Sequence[str], tolerance: float) -> str:
    """Trains under a strategy, and compares with plain Keras.

    Raises:
        DifferentNumbersError: If anything differs by more than `tolerance`.
    """
    initial = initial_weights()
    with make_strategy(kind, devices).scope():
        model = build_model()
    return check_same(train(model, initial), tolerance)


def as_worker(initial: Any) -> ParityOutcome:
    """Trains on one of several workers, and returns the outcome."""
    from keras_dist.strategies.multi_worker_mirrored import (
        MultiWorkerMirroredStrategy,
    )

    with MultiWorkerMirroredStrategy().scope():
        model = build_model()
    return train(model, initial)

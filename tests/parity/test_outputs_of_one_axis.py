"""Outputs of one number a row, which Keras' losses take for a single row.

They reduce the last axis, and here that is the batch's: what they return is
one number for the batch, which no replica knows from its own rows.
"""

import keras
import numpy as np
import pytest
from keras import layers
from keras import losses
from keras import ops

from parity import models
from parity.harness import Case
from parity.harness import assert_same
from parity.harness import plain
from parity.harness import train


def _build(activation):
    def build():
        x = layers.Input((4,))
        column = layers.Dense(1, activation=activation)(x)
        return keras.Model(x, ops.squeeze(column, axis=-1))

    return build


def _real(rows):
    data = models.weighted_table(rows)
    return data | {"y": data["y"][:, 0]}


def _positive(rows):
    data = models.table(rows)
    return data | {"y": np.abs(data["y"][:, 0])}


def _signs(rows):
    data = models.table(rows)
    return data | {"y": (data["y"][:, 0] > 0).astype("float32")}


def _with(loss, **options):
    return lambda: {
        "optimizer": keras.optimizers.SGD(0.1),
        "loss": loss() if callable(loss) else loss,
        **options,
    }


CASES = [
    Case(
        "mean_squared_error_weighted",
        _build("linear"),
        _real,
        _with("mse", metrics=["mae"]),
        rows=19,
        full=True,
    ),
    Case(
        "mean_squared_error_sum",
        _build("linear"),
        _real,
        _with(lambda: losses.MeanSquaredError(reduction="sum")),
    ),
    Case(
        "kl_divergence",
        _build("sigmoid"),
        _positive,
        _with("kl_divergence"),
    ),
    Case(
        "binary_crossentropy_class_weight",
        _build("sigmoid"),
        _signs,
        _with("binary_crossentropy", metrics=["accuracy"]),
        fit={"class_weight": {0: 0.5, 1: 3.0}},
    ),
]


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_same_numbers(case, num_replicas):
    assert_same(train(case, num_replicas), plain(case))

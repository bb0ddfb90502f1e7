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
from parity.cases import with_
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


def _data(of_targets):
    """The table of these targets, each a number and no column."""

    def data(rows):
        table = models.table(rows)
        return table | {"y": of_targets(table["y"][:, 0])}

    return data


def _real(rows):
    return _data(np.asarray)(rows) | {"sample_weight": models.weights_of(rows)}


def _signs(targets):
    return (targets > 0).astype("float32")


SUM = losses.MeanSquaredError(reduction="sum")
CASES = [
    Case(
        "mean_squared_error_weighted",
        _build("linear"),
        _real,
        with_(metrics=["mae"]),
        rows=19,
        full=True,
    ),
    Case("mean_squared_error_sum", _build("linear"), _real, with_(loss=SUM)),
    Case(
        "kl_divergence",
        _build("sigmoid"),
        _data(np.abs),
        with_(loss="kl_divergence"),
    ),
    Case(
        "binary_crossentropy_class_weight",
        _build("sigmoid"),
        _data(_signs),
        with_(loss="binary_crossentropy", metrics=["accuracy"]),
        fit={"class_weight": {0: 0.5, 1: 3.0}},
    ),
]


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_same_numbers(case, num_replicas):
    assert_same(train(case, num_replicas), plain(case))

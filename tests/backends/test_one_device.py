"""One device costs what plain Keras costs, also if it is not the default."""

import keras
import pytest

import keras_dist
from backends.classifier import classifier
from backends.classifier import rows

X, Y = rows(40)


def make_model():
    layers = keras.layers
    return classifier(
        layers.Dense(4), layers.BatchNormalization(), layers.Dropout(0.1)
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras_dist.OneDeviceStrategy("cpu:0"),
        lambda: keras_dist.OneDeviceStrategy("cpu:1"),
        lambda: keras_dist.MirroredStrategy(["cpu:0"]),
        lambda: keras_dist.CentralStorageStrategy(["cpu:1"]),
    ],
    ids=["default", "another", "mirrored", "central"],
)
def test_a_step_of_fit_takes_as_many_calls(calls_a_step, make):
    plain = calls_a_step(make_model(), X, Y)
    with make().scope():
        model = make_model()
    assert calls_a_step(model, X, Y) <= 1.05 * plain

"""One device costs what plain Keras costs, also if it is not the default."""

import keras
import numpy as np
import pytest

import keras_dist

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 6)).astype("float32")
Y = RNG.integers(0, 3, 40)


def make_model():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras_dist.OneDeviceStrategy("cpu:0"),
        lambda: keras_dist.OneDeviceStrategy("cpu:1"),
        lambda: keras_dist.CentralStorageStrategy(["cpu:1"]),
    ],
    ids=["default", "another", "central"],
)
def test_a_step_of_fit_takes_as_many_calls(calls_a_step, make):
    plain = calls_a_step(make_model(), X, Y)
    with make().scope():
        model = make_model()
    assert calls_a_step(model, X, Y) <= 1.05 * plain

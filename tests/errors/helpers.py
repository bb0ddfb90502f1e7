"""Small models and strategies, what is called on them, and what must not be."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_dist

X = np.ones((4, 3), "float32")
Y = np.zeros((4, 1), "float32")
# Methods of a model that need `compile`, and how they are called.
CALLS = {
    "fit": lambda model: model.fit(X, Y, verbose=0),
    "evaluate": lambda model: model.evaluate(X, Y, verbose=0),
    "predict": lambda model: model.predict(X, verbose=0),
    "train_on_batch": lambda model: model.train_on_batch(X, Y),
    "test_on_batch": lambda model: model.test_on_batch(X, Y),
    "predict_on_batch": lambda model: model.predict_on_batch(X),
}
KINDS = {
    "mirrored": lambda: keras_dist.MirroredStrategy(["cpu:0", "cpu:1"]),
    "central": lambda: keras_dist.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    "one": lambda: keras_dist.OneDeviceStrategy("cpu:0"),
    "default": keras_dist.get_strategy,
}
SEVERAL = ["mirrored", "central"]
each_kind = pytest.mark.parametrize("kind", KINDS)


def mirrored(*devices):
    return keras_dist.MirroredStrategy(devices or ["cpu:0", "cpu:1"])


def make_model(kind=keras.Sequential, optimizer=None):
    model = kind([keras.Input((3,)), keras.layers.Dense(1)])
    if optimizer is not None:
        model.compile(optimizer, "mse")
    return model


def mismatch(match):
    return pytest.raises(keras_dist.StrategyMismatchError, match=f"(?s){match}")


def assert_weights(model, expected):
    """Compares weights bit by bit."""
    for now, then in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(now, then)


def run_python(code, warnings="ignore", **environment):
    none = {"KERAS_DIST_VIRTUAL_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-W", warnings, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | none | environment,
    )

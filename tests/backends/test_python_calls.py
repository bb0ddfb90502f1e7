"""A step and a call of `run` take few Python calls of ours."""

import importlib
import sys
import threading
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_dist

# Where they are installed: in this checkout, or far from it.
ROOTS = tuple(
    f"{Path(importlib.import_module(package).__file__).parent}/"
    for package in ("keras_dist", f"keras_dist_{keras.backend.backend()}")
)
X = np.linspace(-1.0, 1.0, 128, dtype="float32").reshape(16, 8)


class Counting:
    """Counts calls of our functions in all threads, while `is_on`."""

    def __init__(self):
        self.count, self.is_on = 0, False

    def __call__(self, frame, event, arg):
        if self.is_on and event == "call":
            self.count += frame.f_code.co_filename.startswith(ROOTS)


@pytest.fixture
def counting():
    found, before = Counting(), sys.getprofile()
    threading.setprofile(found)
    sys.setprofile(found)
    yield found
    sys.setprofile(before)
    threading.setprofile(None)


class OneBatch(keras.callbacks.Callback):
    def __init__(self, counting):
        super().__init__()
        self._counting = counting

    def on_train_batch_begin(self, batch, logs=None):
        self._counting.is_on = batch == 1

    def on_train_batch_end(self, batch, logs=None):
        self._counting.is_on = False


def _model(strategy):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((8,)),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    return model


@pytest.mark.skipif(
    keras.backend.backend() != "torch",
    reason="Elsewhere, no Python of a step runs once it is compiled.",
)
def test_a_batch_of_fit(counting):
    model = _model(keras_dist.MirroredStrategy(["cpu:0", "cpu:1"]))
    options = {"x": X, "y": X[:, :1], "batch_size": 8, "verbose": 0}
    model.fit(**options)
    model.fit(**options, callbacks=[OneBatch(counting)])
    assert 100 < counting.count <= 800


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow",
    reason="The limit is of what TensorFlow traces for two replicas.",
)
def test_a_step_that_is_traced(counting):
    model = _model(keras_dist.MirroredStrategy(["cpu:0", "cpu:1"]))
    model.fit(X, X[:, :1], batch_size=8, verbose=0)
    data = (keras.ops.convert_to_tensor(X[:8]), X[:8, :1])
    step = vars(model)["train_step"]

    def noted(batch):
        counting.is_on = True
        try:
            return step(batch)
        finally:
            counting.is_on = False

    import tensorflow as tf

    tf.function(noted)(data)
    assert 100 < counting.count <= 1100


def test_a_call_of_run(counting):
    strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])

    def replica_fn(a):
        return a + 1

    # Hooks stay in place with it, those on classes of other tests too.
    with strategy.scope():
        kept = keras.Variable(0.0)
    for _ in range(2):
        strategy.run(replica_fn, args=(1.0,))
    counting.is_on = True
    strategy.run(replica_fn, args=(1.0,))
    counting.is_on = False
    assert 50 < counting.count <= 220
    del kept

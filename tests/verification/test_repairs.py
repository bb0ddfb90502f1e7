"""`strategy.verify` finds what was once wrong, with its repair taken out."""

import importlib

import keras
import numpy as np
import pytest
from keras import ops

import keras_dist
from keras_dist.fit import layers as fit_layers
from keras_dist.fit import losses

pytestmark = pytest.mark.only_on(
    "tensorflow",
    "torch",
    reason="On JAX a step has all rows at once, and needs none of the repairs.",
)
ON_TENSORFLOW = pytest.mark.only_on(
    "tensorflow", reason="It was a defect of that backend alone."
)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 5)).astype("float32")
TARGETS = RNG.normal(size=(24, 1)).astype("float32")
LABELS = RNG.integers(0, 3, size=(24, 1))


class Positions(keras.layers.Layer):
    """Adds an embedding of the position, whose indices no batch has."""

    def __init__(self):
        super().__init__(name="positions")
        self.table = keras.layers.Embedding(5, 5, name="table")

    def call(self, x):
        return x + ops.sum(self.table(ops.arange(5)), axis=0)


class Contrast(keras.losses.Loss):
    """Compares the rows of a batch, in a `__call__` of its own."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        likeness = ops.matmul(y_pred, ops.transpose(y_pred))
        are_alike = ops.cast(
            ops.equal(y_true, ops.transpose(y_true)), "float32"
        )
        return ops.mean(ops.square(likeness - are_alike))


class Adds(keras.layers.Layer):
    """Adds a loss for each row, which Keras sums."""

    def __init__(self):
        super().__init__(name="adds")

    def call(self, x):
        self.add_loss(ops.sum(ops.square(x), axis=-1))
        return x


class SumsOnTheTape(keras.Model):
    """Differentiates a loss with a value a row, which TensorFlow sums."""

    def train_step(self, data):
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self(x, training=True) - y), axis=-1)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": ops.mean(loss)}


def _made(layer, loss="mse", optimizer="sgd", cls=keras.Model):
    inputs = keras.Input((5,))
    hidden = inputs if layer is None else layer(inputs)
    model = cls(inputs, keras.layers.Dense(1, name="last")(hidden))
    model.compile(optimizer, loss)
    return model


def _module(name):
    return importlib.import_module(f"keras_dist_tensorflow.{name}")


def _take_out_rows_of_positions(monkeypatch):
    gradients = _module("gradients")
    monkeypatch.setattr(gradients, "_kind_of", lambda node: gradients.Kind.ROWS)


def _take_out_gathering(monkeypatch):
    monkeypatch.setattr(
        losses,
        "_on_gathered_rows",
        lambda step, compute, loss, arguments: compute(*arguments),
    )


def _take_out_terms(monkeypatch):
    monkeypatch.setattr(fit_layers, "_term", lambda step, loss, **_: loss)


def _take_out_sums_on_tapes(monkeypatch):
    def are_sums(step, targets):
        return [False for _ in targets]

    monkeypatch.setattr(_module("replica"), "_are_sums", are_sums)


REPAIRS = {
    "positions": (
        lambda: _made(Positions(), optimizer="adam"),
        TARGETS,
        _take_out_rows_of_positions,
        "sparse gradients",
    ),
    "own_call": (
        lambda: _made(None, Contrast()),
        LABELS,
        _take_out_gathering,
        "an override of Loss.__call__",
    ),
    "added_a_row": (
        lambda: _made(Adds()),
        TARGETS,
        _take_out_terms,
        "a sum over rows",
    ),
    "tape": (
        lambda: _made(None, cls=SumsOnTheTape),
        TARGETS,
        _take_out_sums_on_tapes,
        "a sum over rows",
    ),
}
OF_TENSORFLOW = ("positions", "tape")


CASES = [
    pytest.param(name, marks=[ON_TENSORFLOW] * (name in OF_TENSORFLOW))
    for name in REPAIRS
]


def _verify(name):
    make, y, *_ = REPAIRS[name]
    strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    return strategy.verify(make, X, y, batch_size=8, steps=1)


@pytest.mark.parametrize("name", CASES)
def test_it_finds_what_was_wrong(monkeypatch, name):
    assert _verify(name).same
    *_, take_out, cause = REPAIRS[name]
    take_out(monkeypatch)
    report = _verify(name)
    assert not report.same
    assert report.cause.name == cause, report

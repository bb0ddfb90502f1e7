"""Losses of users' own classes and functions are those of the global batch.

Whatever they override, and whatever else than rows they compute with.
"""

import keras
import numpy as np
import pytest
from keras import layers
from keras import ops

import keras_dist
from parity import models
from parity.harness import assert_same
from parity.harness import compiled
from parity.harness import results

CLASSES = models.classes(21)
build = models.sequence(models.dense(5, activation="tanh"), models.dense(3))
counts = pytest.mark.parametrize("num_replicas", [2, 3])


def contrast(labels, embeddings, temperature=1.0):
    """Of each row with all others, as supervised contrastive losses do."""
    embeddings = ops.normalize(ops.convert_to_tensor(embeddings), axis=-1)
    labels = ops.reshape(labels, (-1, 1))
    logits = ops.matmul(embeddings, ops.transpose(embeddings)) / temperature
    same = ops.cast(ops.equal(labels, ops.transpose(labels)), logits.dtype)
    positives = same / ops.sum(same, axis=-1, keepdims=True)
    return -ops.mean(
        ops.sum(positives * ops.log_softmax(logits, axis=-1), axis=-1)
    )


class Contrastive(keras.losses.Loss):
    """Overrides `__call__`, as keras.io's example does."""

    def __init__(self, temperature=0.7, **kwargs):
        super().__init__(**kwargs)
        self.temperature = temperature

    def __call__(self, y_true, y_pred, sample_weight=None):
        return contrast(y_true, y_pred, self.temperature)


class OtherNames(keras.losses.Loss):
    """Has other arguments, with defaults, and options by name."""

    def __call__(self, labels, embeddings, weights=None, *, temperature=0.5):
        assert weights is None
        return contrast(labels, embeddings, temperature)


class OwnCall(keras.losses.Loss):
    """Overrides `call` only, and couples rows in it."""

    def call(self, y_true, y_pred):
        y_pred = y_pred - ops.mean(y_pred, axis=0, keepdims=True)
        return ops.mean(ops.square(y_pred), axis=-1) + contrast(y_true, y_pred)


class CallsSuper(keras.losses.Loss):
    """Adds to what `call` gives, reduced by Keras."""

    def call(self, y_true, y_pred):
        return ops.mean(ops.square(y_pred), axis=-1)

    def __call__(self, y_true, y_pred, sample_weight=None):
        rows = super().__call__(y_true, y_pred, sample_weight)
        return rows + contrast(y_true, y_pred)


class SubclassOfOne(Contrastive):
    """Inherits a `__call__`, and calls it."""

    def __call__(self, *args, **kwargs):
        return 2.0 * super().__call__(*args, **kwargs)


class Callable:
    """No loss of Keras at all, which wraps it."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return contrast(y_true, y_pred)


class Mixed(Callable, keras.losses.Loss):
    """Has a `__call__` from a class that is no loss."""


class OfKeras(keras.losses.MeanSquaredError):
    """Overrides the `__call__` of a built-in loss."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        y_pred = y_pred - ops.mean(y_pred, axis=0, keepdims=True)
        return super().__call__(ops.zeros_like(y_pred), y_pred, sample_weight)


def defined_late():
    """A class that is made when `fit` has run before."""
    return type("Late", (Contrastive,), {"__call__": Contrastive.__call__})()


MADE = [
    Contrastive,
    OtherNames,
    OwnCall,
    CallsSuper,
    SubclassOfOne,
    Mixed,
    Callable,
    OfKeras,
    defined_late,
]


@counts
@pytest.mark.parametrize("make", MADE)
def test_what_couples_rows(make, num_replicas):
    ours, plain = (
        results(compiled(count, build, loss=make()), CLASSES)
        for count in (num_replicas, None)
    )
    assert_same(ours, plain)


@counts
def test_a_function_that_uses_weights(num_replicas):
    """What does not come from rows counts once, and not once a replica."""

    def outcome(count):
        def penalized(y_true, y_pred):
            kernel = model.layers[0].kernel
            penalty = 0.1 * ops.sum(ops.square(kernel))
            return ops.mean(ops.square(y_true - y_pred), axis=-1) + penalty

        model = compiled(count, build, loss=penalized)
        return results(model, models.table(21, targets=3))

    assert_same(outcome(num_replicas), outcome(None))


class Prototypes(keras.Model):
    """Gives its loss what has no rows: a vector a class, and a constant."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)
        self.prototypes = self.add_weight(shape=(2, 3), initializer="ones")
        self.own_loss = ToPrototypes()
        self(CLASSES["x"][:1])

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
        weights = ops.convert_to_tensor([0.5, 2.0])
        return self.own_loss(y, y_pred, self.prototypes, weights=weights)


class ToPrototypes(keras.losses.Loss):
    def __call__(self, labels, rows, prototypes, weights):
        assert tuple(prototypes.shape) == (2, 3)
        assert tuple(weights.shape) == (2,)
        prototypes = ops.convert_to_tensor(prototypes)
        near = ops.matmul(
            rows - ops.mean(rows, axis=0), ops.transpose(prototypes)
        )
        one_hot = ops.one_hot(ops.reshape(labels, (-1,)), 2) * weights
        return ops.mean(ops.sum(one_hot * ops.square(near - 1.0), axis=-1))


@counts
def test_arguments_without_rows(num_replicas):
    data = models.classes(21, num_classes=2)
    ours, plain = (
        results(compiled(count, Prototypes, loss=None), data)
        for count in (num_replicas, None)
    )
    assert_same(ours, plain)


def test_outside_of_a_step_nothing_is_gathered():
    with keras_dist.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        loss = Contrastive()
    labels, rows = np.array([0, 1, 0]), np.eye(3, dtype="float32")
    want = contrast(labels, rows, 0.7)
    np.testing.assert_allclose(float(loss(labels, rows)), float(want))

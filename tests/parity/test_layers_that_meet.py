"""Layers that wait for other replicas in their call train as on one device."""

import keras
import pytest
from keras import layers
from keras import ops

from parity import models
from parity.harness import FIT
from parity.harness import assert_same
from parity.harness import fitted
from parity.harness import scope
from parity.harness import set_initial_weights


class MeanSquare(layers.Layer):
    """Adds a loss, which waits while other replicas run the same layer."""

    def call(self, inputs):
        self.add_loss(0.1 * ops.mean(ops.square(inputs)))
        return inputs


class RunningMean(layers.Layer):
    """Keeps the mean of its inputs over rows, as a variable of its own.

    Floats are averaged over rows; whole numbers are the same on each replica.
    """

    def build(self, input_shape):
        self.mean = self.add_weight(
            shape=(input_shape[-1],),
            initializer="zeros",
            trainable=False,
            aggregation="mean",
        )
        self.calls = self.add_weight(
            shape=(), initializer="zeros", dtype="int32", trainable=False
        )

    def call(self, inputs, training=False):
        if training:
            self.mean.assign(0.5 * self.mean + 0.5 * ops.mean(inputs, axis=0))
            self.calls.assign_add(1)
        return inputs


STACKS = {
    "losses before batch statistics": lambda: (
        layers.Dense(4),
        MeanSquare(),
        layers.BatchNormalization(),
        layers.Dense(3, activity_regularizer="l2"),
        layers.BatchNormalization(),
    ),
    "a variable of its own": lambda: (
        layers.Dense(3, activity_regularizer="l1"),
        RunningMean(),
    ),
}


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("name", STACKS)
def test_same_numbers(name, num_replicas):
    def outcome(count):
        with scope(count):
            model = keras.Sequential(
                [layers.Input((4,)), *STACKS[name](), layers.Dense(1)]
            )
            set_initial_weights(model)
            # With XLA where Keras uses it, and without a word about it.
            model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
        return fitted(model, **models.table(20), **FIT)

    assert_same(outcome(num_replicas), outcome(None))

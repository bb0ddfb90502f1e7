"""Layers whose replicas interleave: one runs while another one waits."""

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
    """Keeps the mean of its inputs over rows, as a variable of its own."""

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


def outcome(num_replicas, make_layers):
    with scope(num_replicas):
        model = keras.Sequential(
            [layers.Input((4,)), *make_layers(), layers.Dense(1)]
        )
        set_initial_weights(model)
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return fitted(model, **models.table(20), **FIT)


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_losses_added_before_batch_statistics(num_replicas):
    def make_layers():
        return (
            layers.Dense(4),
            MeanSquare(),
            layers.BatchNormalization(),
            layers.Dense(3, activity_regularizer=keras.regularizers.L2(0.1)),
            layers.BatchNormalization(),
        )

    assert_same(outcome(num_replicas, make_layers), outcome(None, make_layers))


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_a_variable_of_a_layers_own(num_replicas):
    """Floats are averaged over rows; whole numbers are the same on each."""

    def make_layers():
        return layers.Dense(3), RunningMean()

    assert_same(outcome(num_replicas, make_layers), outcome(None, make_layers))

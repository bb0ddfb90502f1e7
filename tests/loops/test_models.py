"""Loops of recurrent, convolutional and normalized models train as on one."""

import keras
import pytest
from keras import layers

import keras_dist
from loops.helpers import X
from loops.helpers import Y
from loops.helpers import adam
from loops.helpers import assert_same_numbers
from loops.helpers import batches
from loops.helpers import crossentropy
from loops.helpers import function
from loops.helpers import minimize
from loops.helpers import normal
from loops.helpers import outcome
from loops.helpers import replicas
from loops.helpers import run
from loops.helpers import started

SEQUENCES = normal(1, 5, 3)
IMAGES = normal(2, 6, 6, 2)


def trained(strategy, compiled, make_model, optimizer, x):
    """Trains a classifier; its regularizers count once a batch."""
    with strategy.scope():
        model = started(make_model())
        optimizer = optimizer()

    @function(compiled)
    def train_step(x, y):
        def loss_fn():
            losses = crossentropy(y, model(x, training=True))
            return keras_dist.compute_average_loss(
                losses
            ) + keras_dist.scale_regularization_loss(model.losses)

        return minimize(loss_fn, model, optimizer)

    data = batches(strategy, x, Y)
    losses = [run(strategy, train_step, batch) for batch in data]
    before = outcome(losses=losses, model=model, optimizer=optimizer)
    if optimizer.use_ema:
        optimizer.finalize_variable_values(model.trainable_variables)
    return before | outcome(finalized=model)


def regularized(strategy, compiled):
    def make_model():
        return keras.Sequential(
            [
                keras.Input((4,)),
                # A bias before a normalization would have no gradient.
                layers.Dense(5, use_bias=False, kernel_regularizer="l2"),
                layers.BatchNormalization(
                    momentum=0.8,
                    # Without a strategy there is nothing to share with.
                    synchronized=keras_dist.has_strategy(),
                ),
                layers.Activation("tanh"),
                layers.Dense(3),
            ]
        )

    def optimizer():
        return keras.optimizers.AdamW(
            0.02,
            epsilon=1e-3,
            weight_decay=0.1,
            global_clipnorm=0.5,
            use_ema=True,
            ema_momentum=0.8,
        )

    return trained(strategy, compiled, make_model, optimizer, X)


def recurrent(strategy, compiled):
    def make_model():
        return keras.Sequential(
            [keras.Input((5, 3)), layers.GRU(4), layers.Dense(3)]
        )

    return trained(strategy, compiled, make_model, adam, SEQUENCES)


def convolutional(strategy, compiled):
    def make_model():
        return keras.Sequential(
            [
                keras.Input((6, 6, 2)),
                layers.Conv2D(3, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dense(3),
            ]
        )

    return trained(strategy, compiled, make_model, adam, IMAGES)


# By the sum of all magnitudes.
CASES = [(regularized, 48.20168), (recurrent, 87.07042)]
CASES += [(convolutional, 74.77801)]


@replicas
@pytest.mark.parametrize(("case", "total"), CASES)
def test_same_numbers(case, total, num_replicas):
    assert_same_numbers(case, num_replicas, total=total)

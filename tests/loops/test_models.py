"""Layers and optimizers that have more to them than a dense layer and Adam."""

import keras
import numpy as np
import pytest
from keras import layers
from keras import ops

import keras_dist
from loops.helpers import X
from loops.helpers import Y
from loops.helpers import adam
from loops.helpers import assert_same_numbers
from loops.helpers import batches
from loops.helpers import crossentropy
from loops.helpers import function
from loops.helpers import mirrored
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

        loss, grads = keras_dist.value_and_grad(
            loss_fn, model.trainable_variables
        )
        optimizer.apply(grads, model.trainable_variables)
        return loss

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


@replicas
def test_all_that_an_optimizer_does_to_gradients(num_replicas):
    assert_same_numbers(regularized, num_replicas, total=48.20168)


def recurrent(strategy, compiled):
    def make_model():
        return keras.Sequential(
            [keras.Input((5, 3)), layers.GRU(4), layers.Dense(3)]
        )

    return trained(strategy, compiled, make_model, adam, SEQUENCES)


@replicas
def test_recurrent(num_replicas):
    assert_same_numbers(recurrent, num_replicas, total=87.07042)


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


@replicas
def test_convolutional(num_replicas):
    assert_same_numbers(convolutional, num_replicas, total=74.77801)


def _dropped(num_replicas, seed):
    strategy = mirrored(num_replicas)
    with strategy.scope():
        dropout = layers.Dropout(0.5, seed=seed)

    @keras_dist.function
    def step(x):
        return dropout(x, training=True)

    ones = np.ones((11, 6), "float32")
    return [
        [
            np.asarray(ops.convert_to_numpy(part))
            for part in strategy.experimental_local_results(
                strategy.run(step, args=batch)
            )
        ]
        for batch in batches(strategy, ones, sizes=(8, 3))
    ]


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_dropout_differs_by_replica_and_repeats_with_its_seed(num_replicas):
    """Partial batches, in which a replica has no rows, included."""
    first, again, other = (_dropped(num_replicas, seed) for seed in (7, 7, 8))
    for ours, same in zip(first, again, strict=True):
        for one, two in zip(ours, same, strict=True):
            np.testing.assert_array_equal(one, two)
    for index, part in enumerate(first[0]):
        assert not np.array_equal(part, other[0][index])
        for earlier in first[0][:index]:
            assert not np.array_equal(part, earlier)

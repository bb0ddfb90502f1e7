"""Random layers differ between replicas and steps, and repeat by the seed."""

import keras
import numpy as np
import pytest
from keras import layers
from keras import ops

from parity import models
from parity.harness import JIT
from parity.harness import PLAIN_ONLY
from parity.harness import assert_same
from parity.harness import scope
from parity.harness import state_of

FEATURES = 64


def _always_dropout(num_replicas):
    with scope(num_replicas):
        model = keras.Sequential(
            [layers.Input((FEATURES,)), models.AlwaysDropout()]
        )
        model.compile("sgd", "mse", jit_compile=JIT)
    return model


def _masks(model, rows):
    ones = np.ones((rows, FEATURES), "float32")
    return model.predict(ones, batch_size=rows, verbose=0) > 0


@pytest.mark.smoke
def test_masks_differ_between_replicas():
    masks = _masks(_always_dropout(4), 8)
    assert 0.35 < masks.mean() < 0.65
    assert len({mask.tobytes() for mask in masks}) == 8


def test_masks_differ_between_steps():
    """Also not those of another replica in an earlier step."""
    model = _always_dropout(4)
    masks = np.concatenate([_masks(model, 4) for _ in range(4)])
    assert len({mask.tobytes() for mask in masks}) == 16


def test_masks_repeat():
    first, second = (_masks(_always_dropout(3), 7) for _ in range(2))
    np.testing.assert_array_equal(first, second)


class Scale(layers.Layer):
    """Multiplies by a weight for each feature."""

    def build(self, input_shape):
        self.scale = self.add_weight(shape=input_shape[-1:], initializer="ones")

    def call(self, x):
        return x * self.scale


def _trained_scales(num_replicas, steps=1):
    """Gradients of the scales are how often each feature was kept."""
    keras.utils.set_random_seed(9)
    with scope(num_replicas):
        model = keras.Sequential(
            [layers.Input((FEATURES,)), layers.Dropout(0.5), Scale()]
        )
        model.compile(
            keras.optimizers.SGD(1.0),
            lambda y_true, y_pred: -ops.sum(y_pred, axis=-1),
            jit_compile=JIT,
        )
    x = np.ones((2, FEATURES), "float32")
    trained = []
    for _ in range(steps):
        before = model.get_weights()[0]
        model.train_on_batch(x, x)
        trained.append(np.round(model.get_weights()[0] - before))
    return trained


def test_training_masks_differ_between_replicas_and_steps():
    first, second = _trained_scales(2, steps=2)
    # A row of two gives 0 or 1; one where the replicas' masks differ.
    assert {0.0, 1.0, 2.0} == set(first.tolist())
    assert first.tolist() != second.tolist()


def test_training_repeats_under_a_seed():
    assert _trained_scales(2)[0].tolist() == _trained_scales(2)[0].tolist()


def test_fit_repeats_under_a_seed():
    def outcome():
        keras.utils.set_random_seed(9)
        with scope(3):
            model = models.sequence(
                models.dense(5),
                lambda: layers.Dropout(0.5),
                lambda: layers.GaussianNoise(0.1),
                models.dense(),
            )()
            model.compile("sgd", "mse", jit_compile=JIT)
        model.fit(**models.table(21), batch_size=7, epochs=2, verbose=0)
        return state_of(model)

    assert_same(outcome(), outcome(), rtol=0, atol=0)


@pytest.mark.skipif(PLAIN_ONLY, reason="It has no plain counterpart.")
def test_seed_states_are_plain():
    """The stored seeds are one device's: a checkpoint has one stream."""

    def seeds(num_replicas):
        model = _always_dropout(num_replicas)
        _masks(model, 8)
        generator = model.layers[-1].generator
        return keras.ops.convert_to_numpy(generator.state.value).tolist()

    assert seeds(3) == seeds(None)

"""Optimizers update variables in chunks, with few bytes at once."""

import keras
import numpy as np
import pytest
import torch

from keras_dist_torch import chunks
from parity.harness import central
from parity.harness import strategy

WIDTH = 64
X = np.random.default_rng(0).normal(size=(24, WIDTH)).astype("float32")
OPTIMIZERS = {
    "adadelta": keras.optimizers.Adadelta,
    "adagrad": keras.optimizers.Adagrad,
    "adam": lambda: keras.optimizers.Adam(amsgrad=True),
    "adamax": keras.optimizers.Adamax,
    "adamw": lambda: keras.optimizers.AdamW(global_clipnorm=0.1, use_ema=True),
    "lion": keras.optimizers.Lion,
    "nadam": keras.optimizers.Nadam,
    "rmsprop": lambda: keras.optimizers.RMSprop(centered=True, momentum=0.9),
    "sgd": lambda: keras.optimizers.SGD(momentum=0.9, nesterov=True),
    "accumulation": lambda: keras.optimizers.Adam(
        gradient_accumulation_steps=2
    ),
    "loss scaling": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam()
    ),
}


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", WIDTH * WIDTH * 4)


def trained(optimizer, make=strategy, count=1):
    keras.utils.set_random_seed(0)
    with make(count).scope():
        model = keras.Sequential(
            [
                keras.Input((WIDTH,)),
                *(keras.layers.Dense(WIDTH, "tanh") for _ in range(6)),
            ]
        )
        model.compile(optimizer, "mse")
    model.fit(X, X, batch_size=7, epochs=2, verbose=0)
    return model


def state_of(model):
    variables = [*model.variables, *model.optimizer.variables]
    return [np.array(variable) for variable in variables]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_numbers_are_the_same_to_the_bit(optimizer, monkeypatch):
    whole = state_of(trained(OPTIMIZERS[optimizer]()))
    monkeypatch.setattr(chunks, "CHUNK", WIDTH * WIDTH * 4)
    cut = state_of(trained(OPTIMIZERS[optimizer]()))
    assert len(whole) == len(cut)
    assert all(map(np.array_equal, whole, cut))


@pytest.fixture
def made(monkeypatch):
    """The bytes of the results of each square root, of which Adam takes one."""
    sizes = []
    sqrt = torch._foreach_sqrt

    def noted(tensors):
        results = sqrt(tensors)
        sizes.append(sum(each.nbytes for each in results))
        return results

    monkeypatch.setattr(torch, "_foreach_sqrt", noted)
    return sizes


@pytest.mark.parametrize(
    ("make", "count"), [(strategy, 1), (strategy, 2), (central, 2)]
)
def test_an_update_makes_few_bytes_at_a_time(make, count, small_chunks, made):
    model = trained("adam", make, count)
    weights = sum(v.value.nbytes for v in model.trainable_variables)
    assert 0 < max(made) <= chunks.CHUNK < weights / 6


def test_plain_models_are_left_to_keras(small_chunks, made):
    keras.utils.set_random_seed(0)
    plain = keras.Sequential(
        [keras.Input((WIDTH,)), *(keras.layers.Dense(WIDTH) for _ in range(3))]
    )
    plain.compile("adam", "mse")
    plain.fit(X, X, verbose=0)
    weights = sum(v.value.nbytes for v in plain.trainable_variables)
    assert set(made) == {weights}


def test_optimizers_of_users_are_left_to_them(small_chunks):
    """A step that looks at all variables sees them all."""
    seen = []

    class Own(type(keras.optimizers.SGD())):
        def _parallel_update_step(self, grads, variables, learning_rate):
            seen.append(len(variables))
            super()._parallel_update_step(grads, variables, learning_rate)

    model = trained(Own())
    assert set(seen) == {len(model.trainable_variables)}


def test_variables_that_are_frozen_later_make_other_chunks(small_chunks):
    model = trained("adam")
    before = [np.array(v) for v in model.weights]
    model.layers[0].trainable = False
    model.compile("adam", "mse")
    model.fit(X, X, verbose=0)
    now = [np.array(v) for v in model.weights]
    changed = [
        not np.array_equal(*pair) for pair in zip(before, now, strict=True)
    ]
    assert changed == [False] * 2 + [True] * 10
    assert torch.is_grad_enabled()

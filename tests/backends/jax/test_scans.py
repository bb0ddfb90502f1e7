"""Layers in a scan: under variables='sharded', a step gathers its own slice."""

import functools

import jax
import keras
import numpy as np
import pytest
from keras import layers
from keras import ops

import keras_dist
from backends.jax import test_sharded
from keras_dist_jax.sharding import shards
from parity.harness import assert_same
from parity.harness import state_of

DEPTH, WIDTH, ROWS = 6, 64, 22
X = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")
Y = np.random.default_rng(1).normal(size=(ROWS, 1)).astype("float32")


def scanned(f, x, xs):
    return jax.lax.scan(f, x, xs=xs)[0]


def checkpointed(f, x, xs):
    return jax.lax.scan(jax.checkpoint(f), x, xs, unroll=2)[0]


def of_keras(f, x, xs):
    return ops.scan(f, x, xs, reverse=True)[0]


WAYS = [scanned, checkpointed, of_keras]


class Stack(layers.Layer):
    """Equal layers as one, whose weights have an axis for layers in front."""

    def __init__(self, way, depth=DEPTH, **kwargs):
        super().__init__(**kwargs)
        self.way, self.depth = way, depth

    def build(self, shape):
        width = shape[-1]
        self.kernel = self.add_weight(
            shape=(self.depth, width, width), name="kernel"
        )
        self.bias = self.add_weight(
            shape=(self.depth, width), initializer="zeros", name="bias"
        )

    def call(self, x):
        def layer(x, weights):
            kernel, bias = weights
            return x + ops.tanh(x @ kernel + bias), None

        return self.way(layer, x, (self.kernel.value, self.bias.value))


def model_of(way, depth=DEPTH, width=WIDTH):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((width,)), Stack(way, depth), layers.Dense(1)]
    )
    model.compile("adam", "mse")
    return model


def sharded(way, *sizes):
    strategy = keras_dist.MirroredStrategy(
        [f"cpu:{index}" for index in range(4)], variables="sharded"
    )
    with strategy.scope():
        return model_of(way, *sizes)


def outcome(model, x=X):
    history = model.fit(
        x, Y, batch_size=8, epochs=2, shuffle=False, verbose=0
    ).history
    return {
        "losses": np.array(history["loss"]),
        "evaluation": np.array(model.evaluate(x, Y, verbose=0)),
        "predictions": model.predict(x, verbose=0),
        **state_of(model),
    }


@pytest.mark.parametrize("way", WAYS)
def test_the_numbers_of_one_device(way):
    expected = outcome(model_of(way))
    model = sharded(way)
    assert all(map(shards.is_sharded, model.layers[0].weights[:1]))
    assert_same(outcome(model), expected, 2e-4)


@pytest.mark.parametrize("way", WAYS)
def test_mixed_precision(way):
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        expected, found = outcome(model_of(way)), outcome(sharded(way))
    finally:
        keras.config.set_dtype_policy("float32")
    assert_same(found, expected, 0.05, atol=0.02)


def collectives_of(model):
    before = test_sharded.train_programs()
    model.fit(X[:16], Y[:16], batch_size=16, verbose=0)
    (program,) = [e for e in test_sharded.train_programs() if e not in before]
    return test_sharded.collectives_in(program)


@pytest.mark.parametrize(("way", "unrolled"), [(scanned, 1), (checkpointed, 2)])
def test_no_device_has_more_than_a_slice(way, unrolled):
    found = collectives_of(sharded(way))
    gathers = [size for kind, size in found if kind == "all-gather"]
    kernel, bias = 4 * WIDTH * WIDTH, 4 * WIDTH
    assert gathers and max(gathers) <= kernel
    # The gradients of a layer may be summed together.
    most = max(size for _, size in found)
    assert most <= unrolled * (kernel + bias) < DEPTH * kernel


def test_a_stack_whose_layers_are_spread_is_gathered_whole():
    """The first axis is the one that is cut: a slice is on one device."""
    x = X[:, :8]
    expected = outcome(model_of(scanned, 64, 8), x)
    model = sharded(scanned, 64, 8)
    assert shards.shards_of(model.layers[0].kernel).of_slices() is None
    assert_same(outcome(model, x), expected, 2e-4)


def test_a_value_may_be_used_in_a_scan_and_outside_of_it():
    class Penalized(Stack):
        def call(self, x):
            kernel = self.kernel.value

            def layer(x, kernel):
                return x + ops.tanh(x @ kernel), ops.sum(kernel)

            x, sums = jax.lax.scan(layer, x, kernel)
            return x * (1 + ops.mean(sums) - ops.sum(kernel) / self.depth)

    def made():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input((WIDTH,)), Penalized(None), layers.Dense(1)]
        )
        model.compile("adam", "mse")
        return model

    expected = outcome(made())
    strategy = keras_dist.MirroredStrategy(
        [f"cpu:{index}" for index in range(4)], variables="sharded"
    )
    with strategy.scope():
        model = made()
    assert_same(outcome(model), expected, 5e-4)


def test_other_scans_are_left_to_jax():
    sharded(scanned)
    step = functools.partial(lambda carry, x: (carry + x, carry))
    total, before = jax.lax.scan(f=step, init=0.0, xs=np.arange(4.0))
    assert total == 6 and before.tolist() == [0, 0, 1, 3]
    assert jax.lax.scan(lambda c, _: (c + 1, None), 0, None, length=3)[0] == 3

"""A step of a scan gathers its own slice of what `variables="sharded"` cut."""

import functools

import jax
import keras
import numpy as np
import pytest
from keras import layers
from keras import ops

from backends.jax import measures
from backends.jax.parts import CLASSES
from backends.jax.parts import LABELS
from backends.jax.parts import ROWS
from backends.jax.parts import assert_numbers_of_one_device
from backends.jax.parts import made
from backends.jax.parts import sharded
from keras_dist_jax.sharding import shards
from parity.harness import dtype_policy

DEPTH, WIDTH = 6, 64
X = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")


def scanned(f, x, xs):
    return jax.lax.scan(f, x, xs=xs)[0]


def checkpointed(f, x, xs):
    return jax.lax.scan(jax.checkpoint(f), x, xs, unroll=2)[0]


def of_keras(f, x, xs):
    return ops.scan(f, x, xs, reverse=True)[0]


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


class Penalized(Stack):
    """Uses its kernel in a scan and outside of it."""

    def call(self, x):
        kernel = self.kernel.value

        def layer(x, kernel):
            return x + ops.tanh(x @ kernel), ops.sum(kernel)

        x, sums = jax.lax.scan(layer, x, kernel)
        return x * (1 + ops.mean(sums) - ops.sum(kernel) / self.depth)


def scanned_layers(way=scanned, cls=Stack, depth=DEPTH, width=WIDTH):
    inputs = keras.Input((width,))
    x = layers.Dense(CLASSES)(cls(way, depth, name="stack")(inputs))
    return keras.Model(inputs, x), X[:, :width]


@pytest.mark.parametrize(
    ("options", "rtol"),
    [
        ({"way": scanned}, 2e-4),
        ({"way": checkpointed}, 2e-4),
        ({"way": of_keras}, 2e-4),
        ({"cls": Penalized}, 5e-4),
        # The first axis is the one that is cut: a slice is on one device.
        ({"depth": 64, "width": 8}, 2e-4),
    ],
)
def test_the_numbers_of_one_device(options, rtol):
    make = functools.partial(scanned_layers, **options)
    model = assert_numbers_of_one_device(make, "adam", sharded(), rtol)
    kernel = model.get_layer("stack").kernel
    assert shards.is_sharded(kernel)
    is_spread = shards.shards_of(kernel).of_slices() is None
    assert is_spread == ("depth" in options)


def test_mixed_precision():
    make = functools.partial(scanned_layers, checkpointed)
    with dtype_policy("mixed_bfloat16"):
        assert_numbers_of_one_device(make, "adam", sharded(), 0.05, atol=0.02)


@pytest.mark.parametrize(("way", "unrolled"), [(scanned, 1), (checkpointed, 2)])
def test_no_device_has_more_than_a_slice(way, unrolled):
    make = functools.partial(scanned_layers, way)
    model, x = made(make, "adam", sharded())
    program = measures.step_of(model, x[:16], LABELS[:16])
    found = measures.collectives_in(program)
    gathers = [size for kind, size in found if kind == "all-gather"]
    kernel, bias = 4 * WIDTH * WIDTH, 4 * WIDTH
    assert gathers and max(gathers) <= kernel
    # The gradients of a layer may be summed together.
    most = max(size for _, size in found)
    assert most <= unrolled * (kernel + bias) < DEPTH * kernel


def test_other_scans_are_left_to_jax():
    made(scanned_layers, "adam", sharded())
    step = functools.partial(lambda carry, x: (carry + x, carry))
    total, before = jax.lax.scan(f=step, init=0.0, xs=np.arange(4.0))
    assert total == 6 and before.tolist() == [0, 0, 1, 3]
    assert jax.lax.scan(lambda c, _: (c + 1, None), 0, None, length=3)[0] == 3

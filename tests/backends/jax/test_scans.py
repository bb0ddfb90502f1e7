"""`scan_steps` in transformations of JAX."""

import jax
import keras
import numpy as np
import pytest
from jax import numpy as jnp

import keras_dist


def test_within_a_transformation_it_is_a_loop():
    step = keras_dist.function(lambda x: keras.ops.sum(x**2))

    def both(x):
        return keras_dist.scan_steps(step, iter([x, 2 * x]), 2)

    x = jnp.arange(3.0)
    np.testing.assert_array_equal(both(x), [5.0, 20.0])
    np.testing.assert_array_equal(jax.jit(both)(x), [5.0, 20.0])
    slope = jax.grad(lambda x: keras.ops.sum(both(x)))(x)
    np.testing.assert_array_equal(slope, [0.0, 10.0, 20.0])


def test_within_a_transformation_several_replicas_are_refused():
    strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    step = keras_dist.function(lambda x: keras.ops.sum(x))

    def both(x):
        with strategy.scope():
            return keras_dist.scan_steps(step, iter([x, x]), 2)

    both(jnp.arange(4.0))
    with pytest.raises(keras_dist.UnsupportedModelError, match="traced"):
        jax.jit(both)(jnp.arange(4.0))


class Shaped:
    """It has a shape and equals others, but neither elements nor a hash."""

    shape = (2,)
    dtype = "float32"

    def __eq__(self, other):
        return isinstance(other, Shaped)


@pytest.mark.parametrize("scans", [False, True])
def test_no_error_is_one_of_ours_inside(scans):
    step = keras_dist.function(lambda x, how: x)
    batch = np.ones(2, "float32"), Shaped()
    with pytest.raises(TypeError, match="can't be hashed"):
        if scans:
            keras_dist.scan_steps(step, iter([batch, batch]), 2)
        else:
            step(*batch)

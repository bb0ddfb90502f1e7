"""`run` may not be transformed by JAX, and arrays come to its devices."""

import jax
import keras
import pytest

import keras_dist
from parity.harness import strategy as mirrored


def test_a_traced_run_is_refused_by_name():
    strategy = mirrored(2)

    def step(x):
        return strategy.run(lambda x: x * 2, args=(x,)).values[0]

    for transformed in (jax.jit(step), jax.grad(step)):
        with pytest.raises(
            keras_dist.UnsupportedModelError, match="`strategy.run` can't be"
        ):
            transformed(1.0)


def test_collectives_in_a_jitted_part_are_refused_by_name():
    strategy = mirrored(2)

    @jax.jit
    def part(x):
        return keras_dist.get_replica_context().all_reduce("SUM", x)

    with pytest.raises(keras_dist.UnsupportedModelError, match="jax.jit"):
        strategy.run(lambda: part(1.0))
    total = strategy.run(
        lambda: keras_dist.get_replica_context().all_reduce("SUM", 1.0)
    )
    assert [float(x) for x in total.values] == [2.0, 2.0]


def test_arrays_come_to_the_replicas_device():
    strategy = mirrored(3)
    x = keras_dist.PerReplica([keras.ops.ones(2)] * 3)
    doubled = strategy.run(lambda x, y: x + y, args=(x, keras.ops.ones(2)))
    total = strategy.reduce("SUM", doubled, axis=None)
    again = strategy.run(lambda x: x + 1, args=(total,))
    for index, value in enumerate(again.values):
        assert value.devices() == {jax.devices("cpu")[index]}
        assert value.tolist() == [7.0, 7.0]

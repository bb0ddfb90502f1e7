"""Collectives have second derivatives, and lose no digit of integers."""

import keras
import pytest

import keras_dist
from conformance.contract import contract
from conformance.helpers import BACKEND
from conformance.helpers import gradients
from conformance.helpers import numbers
from conformance.helpers import per_replica
from conformance.helpers import tensor


def context():
    return keras_dist.get_replica_context()


@contract(86, native=False)
def test_second_derivatives_through_a_sum(two):
    """Of `c (sum of x)^3`, with `c` and `x` of each replica's own."""
    x = per_replica(two, lambda i: tensor(1.0 + i))
    c = per_replica(two, lambda i: tensor(1.0 + i))

    def replica_fn(x, c):
        def slope(x):
            def cube(x):
                return c * context().all_reduce("SUM", x) ** 3

            return _slope(cube, x)

        return _slope(slope, x)

    # First: 3 s^2 (c0 + c1), with s = 3. The second is summed over again:
    # each replica's slope depends on both x.
    total = numbers(two.run(replica_fn, (x, c)))
    assert total == pytest.approx([2 * 6 * 3.0 * 3] * 2)


def _slope(fn, x):
    if BACKEND == "jax":
        import jax

        return jax.grad(fn)(x)
    if BACKEND == "torch":
        import torch

        x = x if x.requires_grad else x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(fn(x), x, create_graph=True)
        return slope
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(x)
        value = fn(x)
    return tape.gradient(value, x)


@contract(56, native=False)
@pytest.mark.parametrize("op", ["MAX", "MIN"])
def test_extremes_of_large_integers(two, op):
    dtype = "int32" if BACKEND == "jax" else "int64"
    largest = 2**30 if BACKEND == "jax" else 2**41
    value = per_replica(
        two, lambda i: keras.ops.convert_to_tensor([largest + i], dtype=dtype)
    )
    expected = [largest + (op == "MAX")]
    assert numbers(two.reduce(op, value, axis=None)) == [expected]
    everyone = two.run(lambda x: context().all_reduce(op, x), (value,))
    assert numbers(everyone) == [expected] * 2


@contract(86, native=False)
@pytest.mark.parametrize("op", ["MAX", "MIN"])
def test_a_tie_shares_its_gradient(two, op):
    x = per_replica(two, lambda i: tensor([3.0, 3.0]))

    def replica_fn(x):
        def best(x):
            return keras.ops.sum(context().all_reduce(op, x))

        _, (slope,) = gradients(best, [x])
        return slope

    # Of two equal ones, each gets a half, of the gradients of both replicas.
    assert numbers(two.run(replica_fn, (x,))) == [[1.0, 1.0]] * 2

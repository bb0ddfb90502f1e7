"""Values that are taken apart into one a device add up to what they were."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import Mesh

from keras_dist_jax.partial_sums import PartialSums
from keras_dist_jax.partial_sums import evaluate

ROWS = 8
RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), "float32")


@jax.jit
def looked_at(*values):
    return values


def taken_apart(fn, *args, num_rows=ROWS):
    """What `fn` returns, and what its results were taken apart into."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("replica",))
    pairs = []

    def marked(*args):
        return looked_at(*fn(*args))

    def replaced(equation, nodes):
        if equation.params["name"] != "looked_at":
            return None
        sums = PartialSums(mesh, num_rows)
        pairs.extend(sums.of(node) for node in nodes)
        return [node.value for node in nodes]

    @jax.jit
    def run(*args):
        pairs.clear()
        closed = jax.make_jaxpr(marked)(*args)
        values = evaluate(closed, args, replaced)
        return values, list(pairs)

    return run(*args)


def assert_adds_up(values, pairs, num_stacks):
    assert sum(stack is not None for stack, _ in pairs) == num_stacks
    for value, (stack, rest) in zip(values, pairs, strict=True):
        total = 0 if rest is None else rest
        if stack is not None:
            assert stack.shape == (4, *value.shape)
            total = total + stack.sum(0)
        np.testing.assert_allclose(total, value, rtol=1e-5, atol=1e-5)


def dense(w, b, x):
    return jnp.mean(jnp.tanh(x @ w + b) ** 2)


def regularized(w, b, x):
    return dense(w, b, x) - 0.1 * jnp.sum(w**2) + jnp.sum(b * 3.0)


def shared(w, b, x):
    return dense(w, b, x) + dense(2.0 * w.T.reshape(w.shape), -b, x * 3.0)


def scaled(w, b, x):
    return dense((w / 2).astype("float16"), b, x.astype("float16")) * 8.0


@pytest.mark.parametrize("loss", [dense, regularized, shared, scaled])
def test_gradients_of_products_and_sums(loss):
    args = normal(3, 5), normal(5), normal(ROWS, 3)
    fn = jax.grad(loss, argnums=(0, 1))
    values, pairs = taken_apart(fn, *args)
    if loss is scaled:
        for value, (stack, rest) in zip(values, pairs, strict=True):
            np.testing.assert_allclose(
                stack.sum(0) + (0 if rest is None else rest),
                value,
                rtol=2e-2,
                atol=1e-2,
            )
    else:
        assert_adds_up(values, pairs, num_stacks=2)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stride", [1, 2])
def test_gradients_of_convolutions(groups, stride):
    def loss(kernel, x):
        return jnp.sum(
            jax.lax.conv_general_dilated(
                x,
                kernel,
                (stride, stride),
                "SAME",
                feature_group_count=groups,
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            ** 2
        )

    args = normal(3, 3, 4 // groups, 6), normal(ROWS, 5, 5, 4)
    values, pairs = taken_apart(lambda *a: (jax.grad(loss)(*a),), *args)
    assert_adds_up(values, pairs, num_stacks=1)


def test_gradients_of_rows_that_are_looked_up():
    def loss(table, x):
        return jnp.sum(jnp.take(table, x, axis=0) ** 3)

    args = normal(11, 4), jnp.asarray(RNG.integers(0, 11, (ROWS, 5)))
    values, pairs = taken_apart(lambda *a: (jax.grad(loss)(*a),), *args)
    assert_adds_up(values, pairs, num_stacks=1)


def test_rows_that_are_added_to_what_is_there():
    def fn(table, x, rows):
        return (table.at[x].add(rows),)

    x = jnp.asarray(RNG.integers(0, 11, ROWS))
    values, pairs = taken_apart(fn, normal(11, 4), x, normal(ROWS, 4))
    assert_adds_up(values, pairs, num_stacks=1)


def test_a_difference_of_gradients():
    def fn(w, b, x):
        return (jax.grad(dense)(w, b, x) - jax.grad(dense)(w, b, 2.0 * x),)

    args = normal(3, 5), normal(5), normal(ROWS, 3)
    values, pairs = taken_apart(fn, *args)
    assert_adds_up(values, pairs, num_stacks=1)


def test_rows_that_are_not_where_they_seem_to_be():
    """An axis of the same size, which is cut in place of the rows."""

    def loss(w, x):
        return jnp.sum(jnp.tanh(jnp.einsum("abc,cd->abd", x, w)))

    args = normal(3, 5), normal(ROWS, ROWS, 3)
    for permutation in ((0, 1, 2), (1, 0, 2)):
        values, pairs = taken_apart(
            lambda w, x, p=permutation: (
                jax.grad(loss)(w, jnp.transpose(x, p)),
            ),
            *args,
        )
        assert_adds_up(values, pairs, num_stacks=1)


def test_what_is_no_sum_over_rows_stays_whole():
    def fn(w, x):
        loops = jax.lax.fori_loop(0, 3, lambda i, v: v + x.T @ x, w)
        return w * 2.0, loops, jnp.argmax(x, axis=0), jnp.cumsum(w, 0)

    values, pairs = taken_apart(fn, normal(3, 3), normal(ROWS, 3))
    assert_adds_up(values, pairs, num_stacks=0)


def test_rows_that_no_device_has_as_many_of_stay_together():
    args = normal(3, 5), normal(5), normal(6, 3)
    fn = jax.grad(dense, argnums=(0, 1))
    values, pairs = taken_apart(fn, *args, num_rows=6)
    assert_adds_up(values, pairs, num_stacks=0)

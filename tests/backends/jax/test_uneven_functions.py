"""Compiled functions of replicas with different numbers of rows."""

import functools

import jax
import keras
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from keras import ops

import keras_dist


def to_numpy(value):
    return np.asarray(ops.convert_to_numpy(value))


def strategy_of(num_replicas):
    devices = [f"cpu:{i}" for i in range(num_replicas)]
    return keras_dist.MirroredStrategy(devices)


def rows(strategy, sizes, width=3):
    parts, start = [], 0
    for size in sizes:
        values = np.arange(start, start + size * width, dtype="float32")
        parts.append(values.reshape(size, width) / 10)
        start += size * width
    value = strategy.experimental_distribute_values_from_function(
        lambda c: ops.convert_to_tensor(parts[c.replica_id_in_sync_group])
    )
    return value, parts


def both(strategy, fn, *args):
    """What the compiled and the uncompiled function return, on each."""
    compiled = strategy.run(keras_dist.function(fn), args)
    plain = strategy.run(fn, args)
    return [
        [to_numpy(x) for x in strategy.experimental_local_results(each)]
        for each in (compiled, plain)
    ]


SIZES = [(3, 2), (2, 0), (1, 1, 0, 1), (5, 1, 3, 2)]


def context():
    return keras_dist.get_replica_context()


FUNCTIONS = {
    "rows": lambda x: x * 2,
    "their number": lambda x: x.shape[0] * ops.ones(()),
    "sum": lambda x: context().all_reduce("SUM", ops.sum(x)),
    "sum twice": lambda x: context().all_reduce(
        "SUM", ops.sum(x * context().all_reduce("SUM", ops.sum(x)))
    ),
    "largest": lambda x: context().all_reduce("MAX", ops.sum(x)),
    "mean of integers": lambda x: context().all_reduce(
        "MEAN", ops.convert_to_tensor(x.shape[0])
    ),
    "gathered": lambda x: context().all_gather(x, 0),
    "gathered and cut": lambda x: context().all_gather(x, 0)[: x.shape[0]],
    "merged": lambda x: context().merge_call(
        lambda strategy, value: strategy.reduce("SUM", value, axis=0), (x,)
    ),
    "number of rows, merged": lambda x: context().merge_call(
        lambda strategy, count: strategy.reduce("SUM", count, None),
        (ops.convert_to_tensor(x.shape[0]),),
    ),
    "slope through a sum": lambda x: keras_dist.gradient(
        lambda x: ops.sum(x * context().all_reduce("SUM", ops.sum(x))), x
    ),
    "slope through a gather": lambda x: keras_dist.gradient(
        lambda x: ops.sum(ops.sin(context().all_gather(x, 0))), x
    ),
    "average": lambda x: keras_dist.compute_average_loss(ops.sum(x, axis=1)),
    "number of rows by NumPy, merged": lambda x: context().merge_call(
        lambda strategy, count: strategy.reduce("SUM", count, None),
        (np.float32(x.shape[0]),),
    ),
    "keys in another order, merged": lambda x: context().merge_call(
        lambda strategy, nest: strategy.reduce("SUM", nest["a"], None),
        (keys_by_rows(x),),
    ),
    "keys in another order": lambda x: keys_by_rows(x)["a"],
}


def keys_by_rows(x):
    nest = {"a": ops.sum(x), "b": -ops.ones(())}
    return nest if x.shape[0] < 2 else dict(reversed(nest.items()))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_it_is_what_it_is_uncompiled(name, sizes):
    strategy = strategy_of(len(sizes))
    x, _ = rows(strategy, sizes)
    compiled, plain = both(strategy, FUNCTIONS[name], x)
    for ours, theirs in zip(compiled, plain, strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_results_by_keys_keep_their_keys():
    """In whatever order a replica has them."""
    strategy = strategy_of(4)
    x, parts = rows(strategy, (1, 3, 0, 2))

    @keras_dist.function
    def step(x):
        found = keys_by_rows(x)
        return [found, context().all_reduce("SUM", found)]

    own, total = strategy.run(step, (x,))
    local = strategy.experimental_local_results
    sums = [part.sum() for part in parts]
    np.testing.assert_allclose([*map(to_numpy, local(own["a"]))], sums)
    np.testing.assert_allclose([*map(to_numpy, local(own["b"]))], [-1.0] * 4)
    np.testing.assert_allclose(to_numpy(local(total["a"])[2]), sum(sums))
    np.testing.assert_allclose(to_numpy(local(total["b"])[2]), -4.0)


MEETINGS = {
    "keys": lambda x, few: context().merge_call(
        lambda strategy, nest: 0, ({"a" if few else "b": ops.sum(x)},)
    ),
    "tuples": lambda x, few: context().merge_call(
        lambda strategy, nest: 0, ([[x], x] if few else [x, [x]],)
    ),
    "a number": lambda x, few: context().merge_call(
        lambda strategy, value: 0, (1.0 if few else ops.sum(x),)
    ),
    "ranks": lambda x, few: context().all_reduce("SUM", x if few else x[0]),
    "operations": lambda x, few: context().all_reduce(
        "SUM" if few else "MEAN", ops.sum(x)
    ),
    "order": lambda x, few: [
        context().all_reduce(op, ops.sum(x))
        for op in (("SUM", "MEAN") if few else ("MEAN", "SUM"))
    ],
}


@pytest.mark.parametrize("name", MEETINGS)
def test_meetings_of_different_things_are_refused(name):
    strategy = strategy_of(2)
    x, _ = rows(strategy, (2, 3))
    step = keras_dist.function(lambda x: MEETINGS[name](x, x.shape[0] == 2))
    with pytest.raises(
        keras_dist.ReplicaDivergenceError,
        match="different (things|structures|paths)",
    ):
        strategy.run(step, (x,))


def test_several_arrays_of_several_lengths():
    strategy = strategy_of(3)
    x, _ = rows(strategy, (3, 2, 2))
    y, _ = rows(strategy, (1, 1, 4), width=2)

    def fn(x, y):
        return ops.sum(x) + context().all_reduce("SUM", ops.sum(y))

    compiled, plain = both(strategy, fn, x, y)
    np.testing.assert_allclose(compiled, plain, rtol=1e-6)


def test_what_depends_on_the_number_of_rows_is_no_value_for_all():
    strategy = strategy_of(2)
    with strategy.scope():
        count = keras.Variable(0, dtype="int32", trainable=False)
        mean = keras.Variable(0.0, trainable=False)

    @keras_dist.function
    def counting(x):
        count.assign_add(x.shape[0])

    @keras_dist.function
    def averaging(x):
        mean.assign(float(x.shape[0]))

    x, _ = rows(strategy, (3, 2))
    with pytest.raises(keras_dist.ReplicaDivergenceError, match="variable"):
        strategy.run(counting, (x,))
    assert int(count) == 0
    strategy.run(averaging, (x,))
    assert float(mean) == 2.5
    even, _ = rows(strategy, (2, 2))
    strategy.run(counting, (even,))
    assert int(count) == 2


def test_a_branch_on_rows_that_meets_is_refused():
    strategy = strategy_of(2)

    @keras_dist.function
    def step(x):
        if x.shape[0] == 2:
            return ops.sum(x)
        return context().all_reduce("SUM", ops.sum(x))

    x, _ = rows(strategy, (3, 2))
    with pytest.raises(keras_dist.ReplicaDivergenceError, match="paths"):
        strategy.run(step, (x,))


def test_collectives_in_control_flow_are_refused():
    strategy = strategy_of(2)

    @keras_dist.function
    def step(x):
        return ops.cond(
            ops.sum(context().all_reduce("SUM", ops.sum(x))) > 0,
            lambda: context().all_reduce("SUM", ops.sum(x)),
            lambda: ops.sum(x),
        )

    x, _ = rows(strategy, (3, 2))
    with pytest.raises(keras_dist.UnsupportedModelError, match="control flow"):
        strategy.run(step, (x,))
    even, _ = rows(strategy, (2, 2))
    total = strategy.experimental_local_results(strategy.run(step, (even,)))
    assert [float(t) for t in total] == [pytest.approx(6.6)] * 2


SCALAR = jax.ShapeDtypeStruct((), "float32")


def asked(callback):
    return jax.pure_callback(callback, SCALAR, jnp.float32(1.0))


def times(z, n):
    return np.float32(z * n)


class Times:
    def __init__(self, n):
        self.n = n

    def __call__(self, z):
        return np.float32(z * self.n)

    def method(self, z):
        return self(z)


def with_default(n):
    def times_default(z, by=n):
        return np.float32(z * by)

    return times_default


def with_named_default(n):
    def times_default(z, *, by=n):
        return np.float32(z * by)

    return times_default


def nested(n):
    def inner(z):
        return np.float32(z * n)

    return lambda z: inner(z)


def recursive(n):
    def down(z, depth=2):
        return down(z, depth - 1) if depth else np.float32(z * n)

    return down


CALLBACKS = {
    "closure": lambda n: lambda z: np.float32(z * n),
    "default": with_default,
    "named default": with_named_default,
    "function in a closure": nested,
    "function in its own closure": recursive,
    "partial": lambda n: functools.partial(times, n=n),
    "object": Times,
    "method": lambda n: Times(n).method,
    "array": lambda n: functools.partial(times, n=np.float32(n)),
}
AROUND = {
    "alone": lambda fn, x: fn(x),
    "jit": lambda fn, x: jax.jit(fn)(x),
    "loop": lambda fn, x: lax.fori_loop(0, 1, lambda i, x: fn(x), x),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("kind", CALLBACKS)
def test_callbacks_of_the_number_of_rows_are_not_the_same(kind, around):
    """Copies of one variable were 2.0 and 3.0."""
    strategy = strategy_of(2)
    with strategy.scope():
        mean = keras.Variable(0.0, trainable=False)
        weight = keras.Variable(0.0)

    def value(x):
        callback = CALLBACKS[kind](x.shape[0])
        return AROUND[around](
            lambda y: jax.pure_callback(callback, SCALAR, y), jnp.float32(1.0)
        )

    x, _ = rows(strategy, (2, 3))
    strategy.run(keras_dist.function(lambda x: mean.assign(value(x))), (x,))
    assert [float(to_numpy(c.value)) for c in mean.values] == [2.5, 2.5]
    with pytest.raises(keras_dist.ReplicaDivergenceError, match="variable"):
        strategy.run(
            keras_dist.function(lambda x: weight.assign(value(x))), (x,)
        )


@jax.custom_vjp
def doubled(x):
    return x * 2


doubled.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 2,))
SAME = {
    "callback": lambda: asked(lambda z: np.float32(z * 3)),
    "callback with a constant": lambda: asked(CALLBACKS["closure"](3)),
    "callback with a default": lambda: asked(with_default(3)),
    "callback with a function": lambda: asked(nested(3)),
    "callback with itself": lambda: asked(recursive(3)),
    "callback of a partial": lambda: asked(CALLBACKS["partial"](3)),
    "callback of a method": lambda: asked(KEPT.method),
    "callback in a function": lambda: jax.jit(
        lambda: asked(CALLBACKS["closure"](3))
    )(),
    "derivative of JAX": lambda: jax.nn.relu(jnp.float32(3.0)),
    "derivative of the user": lambda: doubled(jnp.float32(1.5)),
    "checkpoint": lambda: jax.checkpoint(doubled)(jnp.float32(1.5)),
    "constant": lambda: jnp.sum(jnp.arange(2000.0)[:3]),
}
KEPT = Times(3)


@pytest.mark.parametrize("name", SAME)
def test_what_has_nothing_of_the_rows_is_the_same(name):
    strategy = strategy_of(2)
    with strategy.scope():
        weight = keras.Variable(0.0)
    x, _ = rows(strategy, (2, 3))
    step = keras_dist.function(lambda x: weight.assign(SAME[name]()))
    strategy.run(step, (x,))
    assert [float(to_numpy(c.value)) for c in weight.values] == [3.0, 3.0]


LARGE = np.zeros(3000, "float32")


def test_constants_are_compared_to_their_last_element():
    strategy = strategy_of(2)
    with strategy.scope():
        mean = keras.Variable(0.0, trainable=False)

    @keras_dist.function
    def step(x):
        large = LARGE.copy()
        large[1500] = x.shape[0]
        mean.assign(jax.jit(lambda: jnp.sum(jnp.asarray(large)))())

    x, _ = rows(strategy, (2, 3))
    strategy.run(step, (x,))
    assert [float(to_numpy(c.value)) for c in mean.values] == [2.5, 2.5]


COLLECTIVES = {
    "permutation": lambda x, few: lax.ppermute(
        ops.sum(x), "replica", [(0, 1), (1, 0)] if few else [(0, 0), (1, 1)]
    ),
    "axis": lambda x, few: lax.all_gather(
        jnp.ones((2, 2)) * ops.sum(x), "replica", axis=0 if few else 1
    ),
    "groups": lambda x, few: lax.psum(
        ops.sum(x), "replica", axis_index_groups=[[0], [1]] if few else None
    ),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_with_other_settings_are_other_collectives(name):
    strategy = strategy_of(2)
    x, _ = rows(strategy, (2, 3))
    step = keras_dist.function(lambda x: COLLECTIVES[name](x, x.shape[0] == 2))
    with pytest.raises(keras_dist.ReplicaDivergenceError, match="paths"):
        strategy.run(step, (x,))

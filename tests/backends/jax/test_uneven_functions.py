"""Compiled functions take replicas with different numbers of rows.

They run uncompiled then, and say so once.
"""

import jax
import keras
import numpy as np
import pytest
from keras import ops

import keras_dist
from functions.helpers import local
from functions.helpers import numbers
from functions.helpers import strategy_of


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
    return local(compiled), local(plain)


SIZES = [(3, 2), (2, 0), (1, 1, 0, 1), (5, 1, 3, 2)]


def context():
    return keras_dist.get_replica_context()


FUNCTIONS = {
    "rows": lambda x: x * 2,
    "their number": lambda x: x.shape[0] * ops.ones(()),
    "sum": lambda x: context().all_reduce("SUM", ops.sum(x)),
    "gathered and cut": lambda x: context().all_gather(x, 0)[: x.shape[0]],
    "merged": lambda x: context().merge_call(
        lambda strategy, value: strategy.reduce("SUM", value, axis=0), (x,)
    ),
    "slope through a gather": lambda x: keras_dist.gradient(
        lambda x: ops.sum(ops.sin(context().all_gather(x, 0))), x
    ),
    "average": lambda x: keras_dist.compute_average_loss(ops.sum(x, axis=1)),
}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_it_is_what_it_is_uncompiled(name, sizes):
    strategy = strategy_of(len(sizes))
    x, _ = rows(strategy, sizes)
    compiled, plain = both(strategy, FUNCTIONS[name], x)
    for ours, theirs in zip(compiled, plain, strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_array_equal(ours, theirs)


def test_collectives_in_a_branch_are_refused_on_unequal_rows():
    strategy = strategy_of(2)

    @keras_dist.function
    def step(x):
        return ops.cond(
            context().all_reduce("SUM", ops.sum(x)) > 0,
            lambda: context().all_reduce("SUM", ops.sum(x)),
            lambda: ops.sum(x),
        )

    even, uneven = rows(strategy, (2, 2))[0], rows(strategy, (3, 2))[0]
    assert numbers(strategy.run(step, (even,))) == [pytest.approx(6.6)] * 2
    with pytest.raises(keras_dist.UnsupportedModelError, match="control flow"):
        strategy.run(step, (uneven,))


def test_it_is_said_once_and_equal_rows_stay_compiled(capfd):
    strategy = strategy_of(2)
    calls = []

    @keras_dist.function
    def step(x):
        calls.append(x.shape)
        return context().all_reduce("SUM", ops.sum(x))

    even, uneven = rows(strategy, (2, 2))[0], rows(strategy, (3, 2))[0]
    strategy.run(step, (even,))
    traces = len(calls)
    for _ in range(3):
        strategy.run(step, (uneven,))
        strategy.run(step, (even,))
    assert calls[traces:] == [(3, 3), (2, 3)] * 3
    said = capfd.readouterr().err
    assert said.count("'step' runs uncompiled") == 1


def test_a_function_around_run_is_uncompiled_too():
    strategy = strategy_of(2)
    with strategy.scope():
        v = keras.Variable(0.0, aggregation="sum")

    @keras_dist.function
    def step(x):
        total = strategy.run(lambda x: v.assign_add(ops.sum(x)), (x,))
        return strategy.reduce("SUM", total, axis=None)

    x, parts = rows(strategy, (3, 2))
    step(x)
    assert float(v) == pytest.approx(sum(part.sum() for part in parts))


def test_shares_that_a_trace_makes_unequal():
    strategy = strategy_of(2)

    @keras_dist.function
    def step(x):
        shares = keras_dist.PerReplica([x[:3], x[3:]])
        return strategy.reduce(
            "SUM", strategy.run(lambda part: ops.sum(part), (shares,)), None
        )

    assert float(step(np.ones((5, 2), "float32"))) == 10.0
    assert float(step(np.ones((6, 2), "float32"))) == 12.0


def test_what_is_written_to_a_mutable_array_stays():
    strategy = strategy_of(2)

    @keras_dist.function
    def step(x):
        total = jax.new_ref(jax.numpy.zeros(()))
        total[...] = total[...] + ops.sum(x)
        return total[...] + 0 * context().all_reduce("SUM", ops.sum(x))

    x, parts = rows(strategy, (2, 1))
    expected = [part.sum() for part in parts]
    np.testing.assert_allclose(numbers(strategy.run(step, (x,))), expected)


def test_steps_of_a_scan_are_run_one_by_one():
    strategy = strategy_of(2)
    with strategy.scope():
        v = keras.Variable(0.0, aggregation="sum")
    x = np.arange(22, dtype="float32").reshape(11, 2)
    data = strategy.experimental_distribute_dataset([x[:4], x[4:7], x[7:]])
    keras_dist.scan_steps(lambda x: v.assign_add(ops.sum(x)), iter(data), 3)
    assert float(v) == x.sum()


# A number of rows, as it is or through a program inside of a function's.
WAYS = {
    "number": lambda count, value: value + count,
    "jit": lambda count, value: jax.jit(lambda a: a + count)(value),
    "loop": lambda count, value: ops.fori_loop(
        0, 1, lambda i, a: a + count, value
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("way", WAYS)
def test_what_depends_on_the_number_of_rows_is_no_value_for_all(way, dtype):
    """It is a mean where the variable has one."""
    strategy = strategy_of(2)
    with strategy.scope():
        v = keras.Variable(0, dtype=dtype, trainable=False)

    @keras_dist.function
    def step(x):
        count = x.shape[0] if dtype == "int32" else float(x.shape[0])
        v.assign(WAYS[way](ops.cast(count, dtype), v.value))

    x, even = rows(strategy, (3, 2))[0], rows(strategy, (2, 2))[0]
    if dtype == "float32":
        strategy.run(step, (x,))
        assert numbers(v) == [2.5, 2.5]
        return
    with pytest.raises(keras_dist.ReplicaDivergenceError, match="variable"):
        strategy.run(step, (x,))
    assert int(v) == 0
    strategy.run(step, (even,))
    assert int(v) == 2

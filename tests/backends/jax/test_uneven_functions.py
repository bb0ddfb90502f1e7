"""Compiled functions of replicas with different numbers of rows."""

import keras
import numpy as np
import pytest
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
}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_it_is_what_it_is_uncompiled(name, sizes):
    strategy = strategy_of(len(sizes))
    x, _ = rows(strategy, sizes)
    compiled, plain = both(strategy, FUNCTIONS[name], x)
    for ours, theirs in zip(compiled, plain, strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


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

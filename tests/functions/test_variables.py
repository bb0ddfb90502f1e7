"""Compiled functions have collectives, and write variables of each kind."""

import keras
import numpy as np
import pytest

import keras_dist
from functions.helpers import X
from functions.helpers import array
from functions.helpers import cut
from functions.helpers import ids
from functions.helpers import numbers
from functions.helpers import replicas
from functions.helpers import strategy_of

ops = keras.ops


def central_of(num_replicas):
    names = [f"cpu:{index}" for index in range(num_replicas)]
    return keras_dist.CentralStorageStrategy(names, "cpu:3")


@replicas
def test_collectives(num_replicas):
    strategy = strategy_of(num_replicas)

    @keras_dist.function
    def step(x):
        context = keras_dist.get_replica_context()
        rows = ops.reshape(x, (1, 1)) + ops.ones((1, 2))

        def merge(strategy, x):
            return strategy.reduce("MAX", x, axis=None)

        return {
            "sum": context.all_reduce("SUM", x),
            "mean": context.all_reduce("MEAN", x),
            "rows": context.all_gather(rows, axis=0),
            "merged": context.merge_call(merge, args=(x,)),
            "id": ops.cast(context.replica_id_in_sync_group, "int32"),
        }

    n = num_replicas
    for _ in range(2):
        seen = strategy.run(step, (ids(strategy),))
        assert numbers(seen["sum"]) == [n * (n - 1) / 2] * n
        assert numbers(seen["mean"]) == [(n - 1) / 2] * n
        assert numbers(seen["rows"]) == [
            [[i + 1.0] * 2 for i in range(n)] for _ in range(n)
        ]
        assert set(numbers(seen["merged"])) == {n - 1.0}
        assert numbers(seen["id"]) == list(range(n))


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("sum", 3.0), ("mean", 1.5), ("only_first_replica", 1.0)],
)
def test_variables_by_aggregation(aggregation, expected):
    strategy = strategy_of(2)
    with strategy.scope():
        mirrored = keras.Variable(0.0, aggregation=aggregation)
        on_read = keras.Variable(
            0.0, aggregation=aggregation, synchronization="on_read"
        )

    @keras_dist.function
    def step(x):
        mirrored.assign(x + 1)
        on_read.assign_add(x + 1)
        return mirrored + 0.0, on_read + 0.0

    for calls in (1, 2):
        seen, own = strategy.run(step, (ids(strategy),))
        assert float(array(mirrored)) == expected
        assert numbers(seen) == [expected] * 2
        assert numbers(own) == [1.0 * calls, 2.0 * calls]
        assert float(array(on_read)) == expected * calls


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_what_is_built_lazily_is_built_in_the_first_call(num_replicas):
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        dense = keras.layers.Dense(1, kernel_initializer="ones")
        optimizer = keras.optimizers.SGD(0.5)
        seen = keras.metrics.Mean()

    @keras_dist.function
    def step(x):
        def loss_fn():
            return ops.sum(dense(x)) / len(X)

        dense(x)  # it has no variables before
        loss, grads = keras_dist.value_and_grad(
            loss_fn, dense.trainable_variables
        )
        optimizer.apply(grads, dense.trainable_variables)
        seen.update_state(ops.sum(x, axis=1))
        return loss

    for _ in range(2):
        strategy.run(step, (cut(X, num_replicas),))
    expected = 1.0 - X.mean(axis=0)
    np.testing.assert_allclose(array(dense.kernel)[:, 0], expected, rtol=1e-4)
    np.testing.assert_allclose(array(dense.bias), [-1.0], rtol=1e-5)
    np.testing.assert_allclose(
        float(array(seen.result())), X.sum(axis=1).mean(), rtol=1e-4
    )


def test_a_metric_that_a_compiled_function_resets():
    strategy = strategy_of(2)
    with strategy.scope():
        metric = keras.metrics.Sum()
    update = keras_dist.function(lambda x: metric.update_state(x))

    @keras_dist.function
    def reset():
        metric.reset_state()

    with strategy.scope():
        reset()
    for _ in range(2):
        strategy.run(update, (ids(strategy),))
        assert float(array(metric.result())) == 1.0
        with strategy.scope():
            reset()
    assert float(array(metric.result())) == 0.0


@pytest.mark.parametrize("make", [strategy_of, central_of])
@pytest.mark.parametrize(
    "aggregation", ["sum", "mean", "only_first_replica", "none"]
)
def test_a_variable_that_is_returned_is_each_replicas(aggregation, make):
    strategy = make(2)
    with strategy.scope():
        own = keras.Variable(
            0.0, aggregation=aggregation, synchronization="on_read"
        )

    @keras_dist.function
    def write():
        own.assign(_number() + 1.0)

    strategy.run(write)
    inner = keras_dist.function(lambda: own)
    for fn in (
        inner,
        keras_dist.function(lambda: ops.convert_to_tensor(own)),
        keras_dist.function(lambda: own.value),
        keras_dist.function(lambda: inner()),
    ):
        assert numbers(strategy.run(fn)) == [1.0, 2.0]
    nest = strategy.run(keras_dist.function(lambda: {"a": [own], "b": own + 1}))
    assert numbers(nest["a"][0]) == [1.0, 2.0]
    assert numbers(nest["b"]) == [2.0, 3.0]

    @keras_dist.function
    def whole():
        return strategy.run(lambda: own)

    assert numbers(whole()) == [1.0, 2.0]
    if make is strategy_of:  # the other one keeps threads
        assert numbers(strategy.run(lambda: inner())) == [1.0, 2.0]


@pytest.mark.parametrize("make", [strategy_of, central_of])
def test_a_variable_that_was_just_written_is_each_replicas(make):
    strategy = make(2)
    with strategy.scope():
        mirrored = keras.Variable(0.0, aggregation="none", trainable=False)

    @keras_dist.function
    def write():
        mirrored.assign(_number() + 1.0)
        return mirrored, mirrored + 0.0

    itself, read = strategy.run(write)
    assert numbers(read) == [1.0, 2.0]
    assert numbers(itself) == [1.0, 2.0]
    assert float(array(mirrored)) == 1.5


def _number():
    context = keras_dist.get_replica_context()
    return ops.cast(context.replica_id_in_sync_group, "float32")

"""`run` gives one result for each replica, by keys in whatever order."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_dist

DEVICES = ["cpu:0", "cpu:1"]
CONSTANT = np.array([1, 2], "int32")
REDUCTIONS = {
    "default": None,
    "to one": keras_dist.ReductionToOneDevice,
    "copying": keras_dist.HierarchicalCopyAllReduce,
}


def mirrored(operations="default"):
    ops_class = REDUCTIONS[operations]
    return keras_dist.MirroredStrategy(
        DEVICES, cross_device_ops=ops_class and ops_class()
    )


def copying():
    return mirrored("copying")


def central():
    return keras_dist.CentralStorageStrategy(DEVICES)


# A fixture that holds a strategy would hold its threads.
makes = pytest.mark.parametrize("make", [mirrored, copying, central])


@pytest.fixture(params=[False, True], ids=["as it is", "compiled"])
def wrap(request):
    """`keras_dist.function`, or what leaves a function as it is."""
    return keras_dist.function if request.param else lambda fn: fn


operations = pytest.mark.parametrize("operations", ["default", "to one"])


def replica():
    return keras_dist.get_replica_context()


def gathered(dtype):
    return lambda: replica().all_gather(ops.cast([1, 0], dtype), 0)


def summed(dtype):
    return lambda: replica().all_reduce("SUM", ops.cast([1, 0], dtype))


def merged(merge_fn):
    return lambda: replica().merge_call(merge_fn, (ops.cast([1, 0], "int32"),))


EQUAL_RESULTS = {
    "all_gather of integers": (gathered("int32"), 4),
    "all_gather of booleans": (gathered("bool"), 4),
    "all_gather of floats": (gathered("float32"), 4),
    "all_reduce of integers": (summed("int32"), 2),
    "all_reduce of floats": (summed("float32"), 2),
    "a reduction where replicas meet": (
        merged(lambda strategy, x: strategy.reduce("SUM", x, axis=None)),
        2,
    ),
    "a gathering where replicas meet": (
        merged(lambda strategy, x: strategy.gather(x, axis=0)),
        4,
    ),
    "a tensor made by each": (lambda: ops.ones((2,), "int32"), 2),
}


@makes
@pytest.mark.parametrize("name", EQUAL_RESULTS)
def test_equal_results_are_one_of_each_replica(make, name, wrap):
    strategy = make()
    fn, rows = EQUAL_RESULTS[name]
    result = strategy.run(wrap(fn))
    assert isinstance(result, keras_dist.PerReplica)
    own = [
        ops.convert_to_numpy(x)
        for x in strategy.experimental_local_results(result)
    ]
    assert [len(x) for x in own] == [rows, rows]
    everything = ops.convert_to_numpy(strategy.gather(result, axis=0))
    np.testing.assert_array_equal(everything, np.concatenate(own))
    if own[0].dtype != bool:
        total = strategy.reduce("SUM", result, axis=None)
        np.testing.assert_array_equal(ops.convert_to_numpy(total), sum(own))


@makes
def test_the_value_of_a_variable_is_one_of_each_replica(make, wrap):
    strategy = make()
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0])
    result = strategy.run(wrap(lambda: variable.value))
    assert len(strategy.experimental_local_results(result)) == 2
    total = strategy.reduce("SUM", result, axis=None)
    np.testing.assert_array_equal(ops.convert_to_numpy(total), [2.0, 4.0])


@makes
def test_a_compiled_function_gives_a_captured_array_once_a_replica(make):
    strategy = make()
    captured = keras_dist.function(lambda: CONSTANT)
    rows = strategy.gather(strategy.run(captured), axis=0)
    assert ops.convert_to_numpy(rows).tolist() == [1, 2, 1, 2]


def run(strategy, fn):
    """With two rows on the first replica, and three on the other."""
    rows = strategy.experimental_distribute_values_from_function(
        lambda context: ops.ones((2 + context.replica_id_in_sync_group,))
    )
    return strategy.run(fn, (rows,))


def numbers(value):
    return [ops.convert_to_numpy(part).tolist() for part in value.values]


def turned(x, nest):
    """The nest, with its keys turned around on the second replica."""
    return nest if x.shape[0] == 2 else dict(reversed(nest.items()))


@operations
def test_each_key_is_reduced_with_itself(operations, wrap):
    def step(x):
        nest = turned(x, {"a": ops.sum(x), "b": [-ops.sum(x)], "c": 10.0})
        return replica().all_reduce("SUM", nest)

    total = run(mirrored(operations), wrap(step))
    assert numbers(total["a"]) == [5.0, 5.0]
    assert numbers(total["b"][0]) == [-5.0, -5.0]
    assert numbers(total["c"]) == [20.0, 20.0]


def test_each_key_is_gathered_and_returned_with_itself(wrap):
    def step(x):
        every = replica().all_gather(turned(x, {"a": x, "b": -x[:1]}), 0)
        return every, [turned(x, {"a": ops.sum(x), "b": -ops.sum(x)})]

    every, (own,) = run(mirrored(), wrap(step))
    assert numbers(every["a"]) == [[1.0] * 5] * 2
    assert numbers(every["b"]) == [[-1.0] * 2] * 2
    assert numbers(own["a"]) == [2.0, 3.0]
    assert numbers(own["b"]) == [-2.0, -3.0]


@operations
@pytest.mark.parametrize("method", ["all_reduce", "all_gather"])
def test_other_keys_are_refused(method, operations, wrap):
    strategy = mirrored(operations)
    with strategy.scope():
        v = keras.Variable(0.0, trainable=False, aggregation="mean")

    def step(x):
        nest = {"a" if x.shape[0] == 2 else "b": ops.sum(x, keepdims=True)}
        if method == "all_reduce":
            (total,) = replica().all_reduce("SUM", nest).values()
        else:
            (total,) = replica().all_gather(nest, 0).values()
        v.assign(ops.sum(total))

    with pytest.raises(keras_dist.ReplicaDivergenceError, match=r"of \['b'\]"):
        run(strategy, wrap(step))
    assert float(ops.convert_to_numpy(v)) == 0.0

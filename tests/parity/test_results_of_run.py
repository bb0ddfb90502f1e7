"""Results of `run`: each replica gives one, also where they are equal."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_dist

DEVICES = ["cpu:0", "cpu:1"]
CONSTANT = np.array([1, 2], "int32")


def mirrored():
    return keras_dist.MirroredStrategy(DEVICES)


def copying():
    return keras_dist.MirroredStrategy(
        DEVICES, cross_device_ops=keras_dist.HierarchicalCopyAllReduce()
    )


def central():
    return keras_dist.CentralStorageStrategy(DEVICES)


@pytest.fixture(params=[mirrored, copying, central])
def make(request):
    return request.param


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


@pytest.mark.parametrize("name", EQUAL_RESULTS)
@pytest.mark.parametrize("compiled", [False, True])
def test_equal_results_are_one_of_each_replica(make, name, compiled):
    strategy = make()
    fn, rows = EQUAL_RESULTS[name]
    result = strategy.run(keras_dist.function(fn) if compiled else fn)
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


@pytest.mark.parametrize("compiled", [False, True])
def test_the_value_of_a_variable_is_one_of_each_replica(make, compiled):
    strategy = make()
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0])

    def read():
        return variable.value

    result = strategy.run(keras_dist.function(read) if compiled else read)
    assert len(strategy.experimental_local_results(result)) == 2
    total = strategy.reduce("SUM", result, axis=None)
    np.testing.assert_array_equal(ops.convert_to_numpy(total), [2.0, 4.0])


def test_a_compiled_function_gives_a_captured_array_once_a_replica(make):
    strategy = make()

    @keras_dist.function
    def captured():
        return CONSTANT

    rows = strategy.gather(strategy.run(captured), axis=0)
    assert ops.convert_to_numpy(rows).tolist() == [1, 2, 1, 2]

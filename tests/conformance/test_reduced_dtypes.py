"""Booleans and small integers are reduced without overflow.

The original raises a `TypeError` of its own for all of them.
"""

import keras
import numpy as np
import pytest

import keras_dist
from conformance.contract import contract
from conformance.helpers import BACKEND
from conformance.helpers import function
from conformance.helpers import local
from conformance.helpers import per_replica
from conformance.helpers import replica_id
from conformance.helpers import tensor
from conformance.helpers import to_numpy

CROSS_DEVICE_OPS = [
    keras_dist.ReductionToOneDevice,
    keras_dist.HierarchicalCopyAllReduce,
]
SMALL = {
    "bool": ([[True, False], [True, True]], [2, 1], [1.0, 0.5]),
    "int8": ([[100, 1], [100, 2]], [200, 3], [100.0, 1.5]),
    "uint8": ([[200, 1], [200, 2]], [400, 3], [200.0, 1.5]),
    "int16": ([[30000, 1], [30000, 2]], [60000, 3], [30000.0, 1.5]),
}


def _reduced(api, strategy, op, value, axis=None):
    """By each way that reduces over replicas."""
    yield to_numpy(strategy.reduce(op, value, axis=axis))

    @function
    def reduce(value):
        return strategy.reduce(op, value, axis=axis)

    yield to_numpy(reduce(value))

    @function
    def run_and_reduce(value):
        each = strategy.run(keras.ops.copy, args=(value,))
        return strategy.reduce(op, each, axis=axis)

    yield to_numpy(run_and_reduce(value))
    if axis is None:

        def fn(x):
            return api.get_replica_context().all_reduce(op, x)

        yield from local(strategy.run(fn, args=(value,)))
        run = function(lambda x: strategy.run(fn, args=(x,)))
        yield from local(run(value))
        yield from local(strategy.extended.reduce_to(op, value, value))


@contract(49, native=False)
@pytest.mark.parametrize("dtype", SMALL)
def test_booleans_are_counted_and_small_integers_fit(api, two, dtype):
    rows, total, mean = SMALL[dtype]
    value = per_replica(two, lambda i: tensor(rows[i], dtype))
    for op, expected in (("SUM", total), ("MEAN", mean)):
        for reduced in _reduced(api, two, api.ReduceOp[op], value):
            assert reduced.tolist() == expected
            assert reduced.dtype == ("int32" if op == "SUM" else "float32")
        for reduced in _reduced(api, two, api.ReduceOp[op], value, 0):
            along = sum(total) if op == "SUM" else sum(mean) / 2
            assert reduced.tolist() == along


@contract(49, native=False)
@pytest.mark.parametrize("make", CROSS_DEVICE_OPS)
def test_booleans_by_cross_device_operations(api, make):
    strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"], make())
    value = per_replica(strategy, lambda i: tensor([True, bool(i)], "bool"))
    for reduced in _reduced(keras_dist, strategy, "SUM", value):
        assert reduced.tolist() == [2, 1]


@contract(49, native=False)
def test_booleans_have_extremes(api, two):
    value = per_replica(two, lambda i: tensor([True, bool(i), False], "bool"))
    largest = to_numpy(two.reduce("MAX", value, axis=None))
    smallest = to_numpy(two.reduce("MIN", value, axis=None))
    assert largest.astype("bool").tolist() == [True, True, False]
    assert smallest.astype("bool").tolist() == [True, False, False]


@contract(49, native=False)
@pytest.mark.parametrize("op", ["SUM", "MEAN", "MAX"])
@pytest.mark.parametrize(
    "rows", [["a", "b"], ["a", "a"], [None, None], [np.array(["a"])] * 2]
)
def test_what_is_no_number(api, two, op, rows):
    value = keras_dist.PerReplica(rows)
    with pytest.raises(TypeError, match="Only numbers and booleans"):
        two.reduce(op, value, axis=None)
    with pytest.raises(TypeError, match="Only numbers and booleans"):
        two.run(
            lambda: api.get_replica_context().all_reduce(
                op, rows[replica_id(api)]
            )
        )


@contract(49, native=False)
@pytest.mark.skipif(
    BACKEND != "tensorflow", reason="this backend's tensors hold no strings"
)
def test_strings_are_not_joined(api, two):
    value = per_replica(two, lambda i: tensor(["a", "b"], "string"))
    with pytest.raises(TypeError, match="Only numbers and booleans"):
        two.reduce("SUM", value, axis=None)

"""Gathering and reducing give what all rows together do, for any nest."""

import hypothesis
import keras
import numpy as np
import pytest
from hypothesis import strategies as st

import keras_dist
from conformance.contract import contract
from conformance.helpers import to_numpy

CPUS = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
DTYPES = ("float32", "int32", "bool")
SETTINGS = hypothesis.settings(
    max_examples=25, deadline=None, derandomize=True, database=None
)


class Parts(list):
    """The parts of one array: a leaf, although it is a list."""


@st.composite
def parts_of_an_array(draw, num_replicas, rank, axis):
    """Arrays, one a replica, that differ in their size along the axis."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank))
    parts = Parts()
    for _ in range(num_replicas):
        shape[axis] = draw(st.integers(0, 4))
        size = int(np.prod(shape))
        numbers = draw(
            st.lists(st.integers(-4, 4), min_size=size, max_size=size)
        )
        parts.append(np.asarray(numbers).reshape(shape).astype(dtype))
    return parts


@st.composite
def cases(draw):
    """An axis, and a nest of arrays in parts."""
    rank = draw(st.integers(1, 3))
    axis = draw(st.integers(-rank, rank - 1))
    leaf = parts_of_an_array(draw(st.integers(1, 4)), rank, axis)
    nests = st.recursive(
        leaf,
        lambda inner: (
            st.lists(inner, min_size=1, max_size=2)
            | st.tuples(inner, inner)
            | st.dictionaries(
                st.sampled_from("ab"), inner, min_size=1, max_size=2
            )
        ),
        max_leaves=3,
    )
    return axis, draw(nests)


def leaves(nest):
    if isinstance(nest, Parts):
        return [nest]
    values = nest.values() if isinstance(nest, dict) else nest
    return [leaf for value in values for leaf in leaves(value)]


def map_parts(fn, nest):
    if isinstance(nest, Parts):
        return fn(nest)
    if isinstance(nest, dict):
        return {key: map_parts(fn, value) for key, value in nest.items()}
    return type(nest)(map_parts(fn, value) for value in nest)


def assert_equal(got, expected):
    keras.tree.assert_same_structure(got, expected)
    for a, b in zip(
        keras.tree.flatten(to_numpy(got)),
        keras.tree.flatten(expected),
        strict=True,
    ):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-6)


@contract(50, 51, 52, 53, 58, 69, 70, 77, 79, 81, native=False)
@pytest.mark.parametrize(
    "make", [keras_dist.MirroredStrategy, keras_dist.CentralStorageStrategy]
)
@SETTINGS
@hypothesis.given(case=cases())
def test_all_rows_are_gathered_and_reduced(make, case):
    axis, nest = case
    strategy = make(CPUS[: len(leaves(nest)[0])])
    value = strategy.experimental_distribute_values_from_function(
        lambda context: map_parts(
            lambda parts: parts[context.replica_id_in_sync_group], nest
        )
    )
    whole = map_parts(lambda parts: np.concatenate(parts, axis), nest)
    assert_equal(strategy.gather(value, axis=axis), whole)

    def replica_fn(own):
        return keras_dist.get_replica_context().all_gather(own, axis=axis)

    everyone = strategy.run(replica_fn, args=(value,))
    for own in strategy.experimental_local_results(everyone):
        assert_equal(own, whole)
    arrays = keras.tree.flatten(whole)
    if any(array.dtype == bool for array in arrays):
        return
    for op, reduce in (("SUM", np.sum), ("MEAN", np.mean)):
        if op == "SUM" or all(array.shape[axis] for array in arrays):
            expected = keras.tree.map_structure(
                lambda array, reduce=reduce: np.asarray(reduce(array, axis)),
                whole,
            )
            assert_equal(strategy.reduce(op, value, axis=axis), expected)

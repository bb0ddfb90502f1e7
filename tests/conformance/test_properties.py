"""What holds for any nest, shape, split and number of replicas."""

import hypothesis
import keras
import numpy as np
from hypothesis import strategies as st

import keras_dist
from conformance.helpers import to_numpy

DTYPES = ("float32", "int32", "bool")
SETTINGS = hypothesis.settings(
    max_examples=25, deadline=None, derandomize=True, database=None
)


@st.composite
def parts_of_an_array(draw, num_replicas, dtypes=DTYPES):
    """Arrays, one a replica, that differ in their number of rows."""
    dtype = draw(st.sampled_from(dtypes))
    trailing = draw(st.lists(st.integers(1, 3), max_size=2))
    parts = []
    for _ in range(num_replicas):
        shape = (draw(st.integers(0, 4)), *trailing)
        size = int(np.prod(shape))
        numbers = draw(
            st.lists(st.integers(-4, 4), min_size=size, max_size=size)
        )
        parts.append(np.asarray(numbers).reshape(shape).astype(dtype))
    return parts


def nests_of(leaf):
    """Nests of one structure or another with such leaves."""
    return st.recursive(
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


class Parts(list):
    """The parts of one array: a leaf, although it is a list."""


def map_parts(fn, nest):
    if isinstance(nest, Parts):
        return fn(nest)
    if isinstance(nest, dict):
        return {key: map_parts(fn, value) for key, value in nest.items()}
    return type(nest)(map_parts(fn, value) for value in nest)


@st.composite
def cases(draw, dtypes=DTYPES):
    """A number of replicas, and a nest of arrays in parts."""
    num_replicas = draw(st.integers(2, 4))
    leaf = parts_of_an_array(num_replicas, dtypes).map(Parts)
    return num_replicas, draw(nests_of(leaf))


def mirrored(num_replicas):
    return keras_dist.MirroredStrategy(
        [f"cpu:{i}" for i in range(num_replicas)]
    )


def distributed(strategy, nest):
    def value_fn(context):
        index = context.replica_id_in_sync_group
        return map_parts(lambda parts: parts[index], nest)

    return strategy.experimental_distribute_values_from_function(value_fn)


def assert_equal(got, expected):
    for a, b in zip(
        keras.tree.flatten(to_numpy(got)),
        keras.tree.flatten(expected),
        strict=True,
    ):
        assert a.shape == b.shape
        np.testing.assert_array_equal(a, b)


@SETTINGS
@hypothesis.given(cases())
def test_gathering_what_was_distributed_gives_it_back(case):
    num_replicas, nest = case
    strategy = mirrored(num_replicas)
    gathered = strategy.gather(distributed(strategy, nest), axis=0)
    assert_equal(gathered, map_parts(np.concatenate, nest))


@SETTINGS
@hypothesis.given(cases(dtypes=("float32", "int32")))
def test_a_sum_over_rows_is_the_plain_sum(case):
    num_replicas, nest = case
    strategy = mirrored(num_replicas)
    total = strategy.reduce("SUM", distributed(strategy, nest), axis=0)
    assert_equal(
        total, map_parts(lambda parts: np.concatenate(parts).sum(0), nest)
    )


@SETTINGS
@hypothesis.given(cases(dtypes=("float32", "int32")))
def test_every_replica_gathers_the_same(case):
    num_replicas, nest = case
    strategy = mirrored(num_replicas)

    def replica_fn(own):
        return keras_dist.get_replica_context().all_gather(own, axis=0)

    everyone = strategy.run(replica_fn, args=(distributed(strategy, nest),))
    for own in strategy.experimental_local_results(everyone):
        assert_equal(own, map_parts(np.concatenate, nest))

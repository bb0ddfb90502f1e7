"""Replicas get the rows of any global batch in order, each row once."""

import collections

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from conformance.contract import contract
from inputs.helpers import BACKEND
from inputs.helpers import distributed
from inputs.helpers import from_function
from inputs.helpers import joined
from inputs.helpers import lists
from inputs.helpers import parts
from keras_dist.core.nests import leaves_of
from keras_dist.core.options import InputOptions
from keras_dist.core.rows import bounds
from parity.kinds import slices

PROPERTY = settings(
    max_examples=30,
    deadline=None,
    # The fixtures look at what a whole test leaves behind.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
Pair = collections.namedtuple("Pair", ["first", "second"])
DTYPES = ["float32", "int32", "uint8", "bool"]


def _column(rows, dtype, trailing, number):
    size = rows * int(np.prod(trailing))
    values = np.arange(size).reshape(rows, *trailing) + number
    return (values % 2 if dtype == "bool" else values % 251).astype(dtype)


LEAVES = st.tuples(
    st.sampled_from(DTYPES), st.sampled_from([(), (1,), (2, 3), (0,)])
)
KINDS = {
    "tuple": tuple,
    "list": list,
    "dict": lambda pair: {"b": pair[0], "a": pair[1]},
    "named": lambda pair: Pair(*pair),
}
NESTS = st.recursive(
    LEAVES.map(lambda leaf: {"leaf": leaf}),
    lambda inner: st.tuples(
        st.sampled_from(sorted(KINDS)), st.tuples(inner, inner)
    ),
    max_leaves=4,
)


def _nest(shape, rows):
    if isinstance(shape, dict):
        dtype, trailing = shape["leaf"]
        return _column(rows, dtype, trailing, 1)
    kind, pair = shape
    return KINDS[kind]([_nest(inner, rows) for inner in pair])


def _structure(nest):
    if isinstance(nest, dict):
        return {key: _structure(nest[key]) for key in nest}
    if isinstance(nest, (list, tuple)):
        return type(nest).__name__, [_structure(item) for item in nest]
    return None


@contract(161, 163, 165, 182, native=False)
@PROPERTY
@given(
    nest=NESTS,
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    num_replicas=st.integers(1, 4),
    buffer_size=st.integers(0, 2),
)
def test_nothing_is_lost_or_doubled(nest, sizes, num_replicas, buffer_size):
    options = InputOptions(experimental_per_replica_buffer_size=buffer_size)
    given_batches = [_nest(nest, rows) for rows in sizes]
    data = distributed(given_batches, num_replicas, options)
    batches = list(data)
    assert len(batches) == len(sizes)
    for batch, given_batch in zip(batches, given_batches, strict=True):
        assert _structure(batch) == _structure(given_batch)
        for leaf, own in zip(
            leaves_of(batch), leaves_of(given_batch), strict=True
        ):
            edges = bounds(len(own), num_replicas)
            for part, start, stop in zip(
                parts(leaf), edges[:-1], edges[1:], strict=True
            ):
                assert part.shape == own[start:stop].shape
                assert part.dtype == own.dtype
                np.testing.assert_array_equal(part, own[start:stop])
    spec = data.element_spec
    assert _structure(spec) == _structure(given_batches[0])
    for leaf, own in zip(
        leaves_of(spec), leaves_of(given_batches[0]), strict=True
    ):
        for part in leaf.values if num_replicas > 1 else [leaf]:
            assert part.shape == (None, *own.shape[1:])
            assert part.dtype == str(own.dtype)


@contract(176, native=False)
@PROPERTY
@given(
    rows=st.integers(1, 30),
    batch_size=st.integers(1, 8),
    num_replicas=st.integers(1, 4),
)
def test_elements_in_turn(rows, batch_size, num_replicas):
    batches = slices(np.arange(rows, dtype="int32"), batch_size)
    data = from_function(lambda _: batches, num_replicas)
    steps = list(data)
    assert len(steps) == data.cardinality == -(-len(batches) // num_replicas)
    rows_in_order = np.concatenate([joined(step) for step in steps])
    np.testing.assert_array_equal(rows_in_order, np.arange(rows))
    delivered = [part for step in steps for part in lists(step)]
    filled = len(steps) * num_replicas - len(batches)
    assert delivered == [b.tolist() for b in batches] + [[]] * filled


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_none_is_given_to_all(num_replicas):
    (batch,) = distributed([(np.arange(4), None)], num_replicas)
    assert batch[1] is None
    assert joined(batch[0]).tolist() == [0, 1, 2, 3]
    data = distributed([(np.arange(4), None)], num_replicas)
    assert data.element_spec[1] is None


@pytest.mark.parametrize("dtype", ["float64", "int64", "float16", "uint16"])
def test_dtypes_are_what_the_framework_makes_of_them(dtype):
    data = distributed([np.zeros((4,), dtype)], 2)
    (batch,) = data
    expected = keras.backend.standardize_dtype(
        keras.ops.convert_to_tensor(np.zeros((4,), dtype)).dtype
    )
    for part, spec in zip(batch.values, data.element_spec.values, strict=True):
        assert keras.backend.standardize_dtype(part.dtype) == spec.dtype
        assert spec.dtype == expected


def test_strings():
    data = distributed([np.array(["a", "b", "c"])], 2)
    if BACKEND == "tensorflow":
        (batch,) = data
        assert lists(batch) == [[b"a", b"b"], [b"c"]]
        assert data.element_spec.values[0].dtype == "string"
    else:
        with pytest.raises(ValueError, match="a dtype that the backend"):
            list(data)


@pytest.mark.runs_on("tensorflow")
@contract(171, native=False)
def test_a_static_spec():
    tf = pytest.importorskip("tensorflow")
    rows = tf.data.Dataset.range(8)

    def row_count(dataset):
        spec = distributed(dataset, 2).element_spec
        return {part.shape[0] for part in spec.values}

    assert row_count(rows.batch(4)) == {None}
    assert row_count(rows.batch(4, drop_remainder=True)) == {2}
    assert row_count(rows.batch(3, drop_remainder=True)) == {None}
    assert row_count(rows.repeat().batch(4)) == {None}
    assert distributed(rows.batch(3), 1).element_spec.shape == (None,)


@pytest.mark.runs_on("tensorflow")
def test_ragged_tensors():
    if BACKEND != "tensorflow":
        pytest.skip("Ragged tensors are TensorFlow's.")
    import tensorflow as tf

    ragged = tf.ragged.constant([[1], [2, 3], [], [4]])
    data = distributed(tf.data.Dataset.from_tensors(ragged), 2)
    (batch,) = data
    assert [part.to_list() for part in batch.values] == [
        [[1], [2, 3]],
        [[], [4]],
    ]
    assert data.element_spec.values[0].ragged

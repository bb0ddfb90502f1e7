"""A distributed iterator loses no batch, whatever ends or interrupts it."""

import gc
import weakref

import keras
import numpy as np
import pytest

from conformance.contract import contract
from inputs.helpers import distributed
from inputs.helpers import joined
from inputs.helpers import lists
from inputs.helpers import strategy_of
from keras_dist.core import context
from keras_dist.core.options import InputOptions
from keras_dist.errors import OutOfRangeError
from keras_dist.inputs.dataset import distribute_dataset

BATCHES = [np.arange(4), np.arange(4, 8), np.arange(8, 9)]


@contract(168, 169, native=False)
def test_next_and_its_end():
    iterator = iter(distributed(BATCHES, 2))
    assert iter(iterator) is iterator
    assert lists(next(iterator)) == [[0, 1], [2, 3]]
    assert lists(iterator.get_next()) == [[4, 5], [6, 7]]
    optional = iterator.get_next_as_optional()
    assert optional.has_value()
    assert lists(optional.get_value()) == [[8], []]
    assert optional.element_spec.values[0].shape == (None,)
    for _ in range(2):
        optional = iterator.get_next_as_optional()
        assert not optional.has_value()
        with pytest.raises(ValueError, match="no value"):
            optional.get_value()
        with pytest.raises(StopIteration):
            next(iterator)
        with pytest.raises(OutOfRangeError, match="no next element"):
            iterator.get_next()


@pytest.mark.parametrize("buffer_size", [0, 1, 2, 9])
def test_how_far_is_read_ahead(buffer_size):
    read = []

    def batches():
        for index in range(6):
            read.append(index)
            yield np.full((2,), index)

    options = InputOptions(experimental_per_replica_buffer_size=buffer_size)
    iterator = iter(distributed(batches, 2, options))
    assert read == []
    assert lists(next(iterator)) == [[0], [0]]
    assert len(read) == min(1 + buffer_size, 6)
    assert [joined(batch)[0] for batch in iterator] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("buffer_size", [0, 1, 2])
def test_an_error_comes_where_its_batch_would_have_come(buffer_size):
    def batches():
        yield np.arange(2)
        yield np.arange(2)
        raise RuntimeError("no third batch")

    options = InputOptions(experimental_per_replica_buffer_size=buffer_size)
    iterator = iter(distributed(batches, 2, options))
    for _ in range(2):
        assert lists(next(iterator)) == [[0], [1]]
    with pytest.raises(RuntimeError, match="no third batch"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


def test_an_interrupt_loses_nothing_that_was_read():
    def batches():
        yield np.arange(2)
        yield np.arange(2, 4)
        raise KeyboardInterrupt

    iterator = iter(distributed(batches, 2))
    assert lists(next(iterator)) == [[0], [1]]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert lists(next(iterator)) == [[2], [3]]


@contract(173, native=False)
def test_a_dropped_iterator_leaves_nothing():
    closed = []

    def batches():
        try:
            yield from BATCHES
        finally:
            closed.append(True)

    data = distributed(batches, 2)
    for _ in data:
        break
    gc.collect()
    assert closed == [True]
    iterator = iter(data)
    next(iterator)
    reference = weakref.ref(iterator)
    gc.disable()
    try:
        del iterator
        assert reference() is None
    finally:
        gc.enable()


@contract(167, native=False)
def test_two_passes_at_once():
    data = distributed(BATCHES, 2)
    first, second = iter(data), iter(data)
    assert lists(next(first)) == lists(next(second)) == [[0, 1], [2, 3]]
    assert lists(next(first)) == [[4, 5], [6, 7]]
    assert lists(next(second)) == [[4, 5], [6, 7]]


@contract(170, native=False)
def test_in_a_replica_function():
    strategy = strategy_of(2)
    data = distribute_dataset(strategy, BATCHES)
    iterator = iter(data)
    message = "should be called from outside of replica_fn"
    with context.in_replica(strategy):
        with pytest.raises(ValueError, match=rf"next\(iterator\) {message}"):
            next(iterator)
        with pytest.raises(ValueError, match=message):
            iterator.get_next()
        with pytest.raises(ValueError, match=message):
            iterator.get_next_as_optional()
        with pytest.raises(ValueError, match=message):
            iter(data)
    assert lists(next(iterator)) == [[0, 1], [2, 3]]


@pytest.mark.runs_on("tensorflow")
def test_inside_of_a_graph():
    tf = pytest.importorskip("tensorflow")
    data = distributed(BATCHES, 2)
    iterator = iter(data)

    @tf.function(autograph=False)
    def of_iterator():
        next(iterator)

    @tf.function(autograph=False)
    def of_dataset():
        iter(data)

    for fn in (of_iterator, of_dataset):
        with pytest.raises(NotImplementedError, match="a loop outside"):
            fn()


DTYPES = ["float16", "bfloat16", "float32", "int32", "uint8", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_the_framework_are_cut(dtype):
    batch = keras.ops.cast(keras.ops.arange(6), dtype)
    (split,) = distributed([batch], 4)
    for part in split.values:
        assert keras.backend.standardize_dtype(part.dtype) == dtype
    rows = [
        row
        for part in split.values
        for row in keras.ops.convert_to_numpy(keras.ops.cast(part, "float32"))
    ]
    assert rows == ([0, 1, 1, 1, 1, 1] if dtype == "bool" else [*range(6)])

"""Datasets that a function makes give replicas their elements in turn."""

import numpy as np
import pytest

from conformance.contract import contract
from inputs.helpers import PER_REPLICA
from inputs.helpers import distributed
from inputs.helpers import from_function
from inputs.helpers import lists
from inputs.helpers import parts
from keras_dist.core.options import InputOptions
from keras_dist.core.options import InputReplicationMode
from keras_dist.inputs.sources.numpy_data import numpy_dataset


@contract(177, native=False)
def test_an_incomplete_step_is_filled():
    batches = [
        (np.full((2, 3), i, "float32"), {"y": np.full((2,), i)})
        for i in range(3)
    ]
    steps = list(from_function(lambda _: batches, 2))
    assert [part.shape for part in parts(steps[1][0])] == [(2, 3), (0, 3)]
    assert [part.shape for part in parts(steps[1][1]["y"])] == [(2,), (0,)]
    assert parts(steps[1][0])[1].dtype == "float32"


@contract(177, native=False)
def test_an_incomplete_step_of_static_batches_is_dropped():
    dataset = numpy_dataset(np.arange(6)).batch(2, drop_remainder=True)
    data = from_function(lambda _: dataset, 2)
    assert data.cardinality == 1
    assert [lists(step) for step in data] == [[[0, 1], [2, 3]]]
    assert data.element_spec.values[0].shape == (2,)
    assert len(list(from_function(lambda _: dataset, 1))) == 3


def test_elements_without_rows():
    """Each replica gets a scalar; none can be made of no rows."""
    data = from_function(lambda _: numpy_dataset(np.arange(5)), 2)
    assert [lists(step) for step in data] == [[0, 1], [2, 3]]
    assert data.cardinality == 2
    assert data.element_spec.values[1].shape == ()


@contract(178, native=False)
def test_replicas_with_less_data_get_empty_batches():
    def dataset_fn(context):
        count = 1 + 2 * context.input_pipeline_id
        return [np.full((2,), i) for i in range(count)]

    data = from_function(dataset_fn, 2, PER_REPLICA)
    assert data.cardinality == 3
    assert [lists(step) for step in data] == [
        [[0, 0], [0, 0]],
        [[], [1, 1]],
        [[], [2, 2]],
    ]


def test_a_replica_without_any_data():
    def dataset_fn(context):
        return [np.ones((2, 3))] * context.input_pipeline_id

    (step,) = from_function(dataset_fn, 2, PER_REPLICA)
    assert [part.shape for part in parts(step)] == [(0, 3), (2, 3)]


def test_static_batches_end_with_the_shortest_dataset():
    def dataset_fn(context):
        rows = np.arange(2 + 2 * context.input_pipeline_id)
        return numpy_dataset(rows).batch(2, drop_remainder=True)

    data = from_function(dataset_fn, 2, PER_REPLICA)
    assert data.cardinality == 1
    assert [lists(step) for step in data] == [[[0, 1], [0, 1]]]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [((None, 2), -1), ((None, None), -1), ((2, 2), 2), ((3, 2), 3)],
)
def test_how_many_steps(counts, expected):
    def dataset_fn(context):
        count = counts[context.input_pipeline_id]
        if count is None:
            tf = pytest.importorskip("tensorflow")
            return tf.data.Dataset.range(3).batch(2).repeat()
        return [np.ones(1)] * count

    assert from_function(dataset_fn, 2, PER_REPLICA).cardinality == expected


def test_a_dataset_placed_on_devices():
    options = InputOptions(False, InputReplicationMode.PER_REPLICA, True)
    (step,) = from_function(lambda _: [np.arange(2)], 2, options)
    assert lists(step) == [[0, 1], [0, 1]]


def test_generators_from_a_function():
    def dataset_fn(context):
        return (np.full((1,), i) for i in range(3))

    data = from_function(dataset_fn, 2)
    assert [lists(step) for step in data] == [[[0], [1]], [[2], []]]
    with pytest.raises(ValueError, match="can't be read again"):
        iter(data)


def test_one_replica_gets_tensors():
    data = distributed([np.arange(3)], 1)
    (batch,) = data
    assert batch.shape == (3,)

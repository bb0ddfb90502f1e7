"""Data that can't be distributed, and what the errors say."""

import keras
import numpy as np
import pytest

from inputs.helpers import distributed
from inputs.helpers import from_function
from inputs.helpers import lists
from keras_dist.core.options import InputOptions
from keras_dist.core.options import InputReplicationMode
from keras_dist.inputs.sources.numpy_data import numpy_dataset

PER_REPLICA = InputOptions(
    experimental_replication_mode=InputReplicationMode.PER_REPLICA
)


@pytest.mark.parametrize(
    "data",
    [
        np.ones((4, 2)),
        (np.ones((4, 2)), np.ones(4)),
        {"x": np.ones((4, 2))},
        keras.ops.ones((4, 2)),
    ],
    ids=["array", "tuple", "dict", "tensor"],
)
def test_arrays_have_no_batch_size(data):
    with pytest.raises(ValueError, match="batch first.*make_numpy_dataset"):
        distributed(data, 2)


def test_what_is_no_data():
    with pytest.raises(ValueError, match="Received: 7 of type int"):
        distributed(7, 2)
    with pytest.raises(ValueError, match="from_function.*Received: None"):
        from_function(lambda _: None, 2)


def test_distributed_twice():
    data = distributed([np.ones(2)], 2)
    with pytest.raises(ValueError, match="distributed already"):
        distributed(data, 2)
    with pytest.raises(ValueError, match="distributed already"):
        from_function(lambda _: data, 2)


def test_unbatched_rows():
    rows = numpy_dataset((np.arange(4), np.arange(4)))
    with pytest.raises(ValueError, match="not batched.*batch first"):
        next(iter(distributed(rows, 2)))
    assert [lists(x)[0] for x, _ in distributed(rows, 1)] == [0, 1, 2, 3]


def test_a_leaf_that_is_a_scalar():
    batch = {"x": np.ones((4, 2)), "more": [np.ones(4), 3.0]}
    with pytest.raises(
        ValueError, match=r"leaf `\['more'\]\[1\]` of shape \(\)"
    ):
        next(iter(distributed([batch], 2)))


def test_a_leaf_with_other_rows():
    batch = (np.ones((4, 2)), np.ones(3))
    with pytest.raises(ValueError, match=r"leaf `\[1\]` of shape \(3,\)"):
        next(iter(distributed([batch], 2)))


def test_a_batch_of_nothing():
    with pytest.raises(ValueError, match="batch first"):
        next(iter(distributed([(None, None)], 2)))


def test_a_leaf_that_no_backend_has():
    with pytest.raises(ValueError, match=r"leaf `\[1\]` .*dtype object"):
        list(distributed([(np.ones(2), np.array([{}, {}]))], 2))


def test_a_dataset_for_each_replica_needs_a_function():
    with pytest.raises(
        NotImplementedError, match="distribute_datasets_from_function"
    ):
        distributed([np.ones(2)], 2, PER_REPLICA)


def test_a_leaf_that_can_not_be_cut():
    class Sparse:
        shape, dtype = (4, 2), "float32"

    with pytest.raises(ValueError, match=r"leaf `\['x'\]` .*, a Sparse"):
        list(distributed([{"x": Sparse()}], 2))

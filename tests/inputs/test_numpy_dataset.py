"""A dataset of arrays has their rows, batched and repeated as asked for."""

import collections

import numpy as np
import pytest

from inputs.helpers import distributed
from inputs.helpers import lists
from keras_dist.inputs.sources.numpy_data import numpy_dataset


def test_structures_are_kept():
    Pair = collections.namedtuple("Pair", ["x", "y"])
    dataset = numpy_dataset({"a": (np.arange(3), np.arange(3.0))})
    assert dataset.cardinality == 3
    assert dataset.element_spec["a"][0].shape == ()
    rows = list(dataset)
    assert rows[1] == {"a": (1, 1.0)}
    pair = next(iter(numpy_dataset(Pair(np.arange(3), np.ones((3, 2))))))
    assert isinstance(pair, Pair)
    assert pair.y.shape == (2,)
    stacked = numpy_dataset([np.arange(3), np.arange(3) + 10])
    assert [row.tolist() for row in stacked] == [[0, 1, 2], [10, 11, 12]]


def test_batches():
    dataset = numpy_dataset(np.arange(5))
    assert [b.tolist() for b in dataset.batch(2)] == [[0, 1], [2, 3], [4]]
    dropped = dataset.batch(2, drop_remainder=True)
    assert [b.tolist() for b in dropped] == [[0, 1], [2, 3]]
    assert (dataset.batch(2).cardinality, dropped.cardinality) == (3, 2)
    assert dataset.batch(2).element_spec.shape == (None,)
    assert dropped.element_spec.shape == (2,)
    assert [b.tolist() for b in dataset.repeat(2).batch(4)] == [
        [0, 1, 2, 3],
        [4, 0, 1, 2],
        [3, 4],
    ]
    assert [b.tolist() for b in dataset.repeat(3).batch(12)] == [
        [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1],
        [2, 3, 4],
    ]


@pytest.mark.parametrize("count", [(), (None,), (-1,)])
def test_repeated_for_ever(count):
    endless = numpy_dataset(np.arange(3)).repeat(*count).batch(2)
    assert endless.cardinality == -1
    assert endless.element_spec.shape == (2,)
    read = iter(endless)
    assert [next(read).tolist() for _ in range(3)] == [[0, 1], [2, 0], [1, 2]]
    data = distributed(endless, 2)
    assert data.element_spec.values[0].shape == (1,)
    assert lists(next(iter(data))) == [[0], [1]]


@pytest.mark.parametrize(
    "columns", [(), (np.ones(3), np.ones(4)), np.float32(1)]
)
def test_columns_that_have_no_common_rows(columns):
    with pytest.raises(ValueError, match="arrays with the same number of rows"):
        numpy_dataset(columns)


def test_batches_that_are_asked_for_wrongly():
    dataset = numpy_dataset(np.arange(3))
    with pytest.raises(ValueError, match="in batches of 2 already"):
        dataset.batch(2).batch(2)
    with pytest.raises(ValueError, match="Received: batch_size=0"):
        dataset.batch(0)
    with pytest.raises(ValueError, match="(?s)`count`.*Received: -2"):
        dataset.repeat(-2)
    with pytest.raises(ValueError, match="must come before `batch`"):
        dataset.batch(2).repeat()
    assert list(numpy_dataset(np.zeros((0, 3))).batch(2)) == []

"""Of data that all workers read alike, each has its rows of each batch."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.contract import contract
from inputs.helpers import PER_REPLICA
from inputs.helpers import distributed
from inputs.helpers import installed
from inputs.helpers import lists
from inputs.helpers import parts
from inputs.test_sources import KINDS
from inputs.test_splits import PROPERTY
from inputs.workers import read
from inputs.workers import strategies_of
from keras_dist.core.nests import leaves_of
from keras_dist.core.rows import bounds
from keras_dist.inputs.dataset import distribute_dataset
from keras_dist.inputs.sources.numpy_data import numpy_dataset
from parity.kinds import slices


def batches_of(rows, batch_size):
    return slices(np.arange(rows), batch_size)


def rows_of_workers(rows, batch_size, num_workers=2, num_replicas=1):
    """For each worker, its steps."""
    return [
        read(distribute_dataset(strategy, batches_of(rows, batch_size)))
        for strategy in strategies_of(num_workers, num_replicas)
    ]


@contract(185, 187, 188)
@pytest.mark.parametrize(
    ("rows", "batch_size", "chief", "other"),
    [
        (8, 3, [[[0, 1]], [[3, 4]], [[6]]], [[[2]], [[5]], [[7]]]),
        (7, 4, [[[0, 1]], [[4, 5]]], [[[2, 3]], [[6]]]),
        (5, 4, [[[0, 1]], [[4]]], [[[2, 3]], [[]]]),
        (6, 8, [[[0, 1, 2]]], [[[3, 4, 5]]]),
    ],
)
def test_the_last_batch(rows, batch_size, chief, other):
    assert rows_of_workers(rows, batch_size) == [chief, other]


@contract(185)
@PROPERTY
@given(
    sizes=st.lists(st.integers(0, 11), min_size=1, max_size=4),
    num_workers=st.integers(1, 4),
    num_replicas=st.integers(1, 3),
)
def test_no_row_is_lost_or_doubled(sizes, num_workers, num_replicas):
    edges = [0, *itertools.accumulate(sizes)]
    rows = np.arange(edges[-1])
    batches = [rows[a:b] for a, b in itertools.pairwise(edges)]
    per_worker = [
        read(distribute_dataset(strategy, batches))
        for strategy in strategies_of(num_workers, num_replicas)
    ]
    assert {len(steps) for steps in per_worker} == {len(sizes)}
    for index, batch in enumerate(batches):
        own = [steps[index] for steps in per_worker]
        counts = [sum(map(len, replicas)) for replicas in own]
        assert max(counts) - min(counts) <= 1
        everyone = [part for replicas in own for part in replicas]
        assert sum(everyone, []) == batch.tolist()
        cut = bounds(len(batch), num_workers * num_replicas)
        assert [len(part) for part in everyone] == np.diff(cut).tolist()


@pytest.mark.parametrize(("make", "cardinality"), KINDS)
def test_every_kind_of_data(make, cardinality):
    """Worker 1 of 2 with two replicas: the third and fourth of four."""
    strategy = strategies_of(2, 2)[1]
    data = distribute_dataset(strategy, make())
    assert data.cardinality == cardinality
    steps = list(data)
    whole = list(distributed(make(), 4))
    assert len(steps) == len(whole) > 0
    for step, everyone in zip(steps, whole, strict=True):
        for leaf, all_parts in zip(
            leaves_of(step), leaves_of(everyone), strict=True
        ):
            assert lists(leaf) == lists(all_parts)[2:]


def test_empty_shares_keep_shape_and_dtype():
    batch = {"x": np.zeros((1, 2, 3), "float32"), "y": None}
    (step,) = distribute_dataset(strategies_of(3)[2], [batch])
    (part,) = parts(step["x"])
    assert (part.shape, part.dtype) == ((0, 2, 3), "float32")
    assert step["y"] is None


def test_arrays_are_not_copied_to_be_cut():
    whole = np.arange(8)
    strategy = strategies_of(2)[1]
    feed = distribute_dataset(strategy, [whole])._feed
    ((part,),) = feed.steps()
    assert np.shares_memory(part, whole)


def test_data_that_workers_can_not_share():
    strategy = strategies_of(2)[0]
    rows = numpy_dataset(np.arange(4))
    with pytest.raises(ValueError, match="not batched"):
        next(iter(distribute_dataset(strategy, rows)))
    with pytest.raises(NotImplementedError, match="from_function"):
        distribute_dataset(strategy, [np.ones(2)], PER_REPLICA)


@contract(171, native=False)
@installed("tensorflow")
def test_the_spec_is_of_the_parts():
    import tensorflow as tf

    rows = tf.data.Dataset.range(24)
    strategy = strategies_of(2, 2)[1]

    def row_counts(dataset):
        data = distribute_dataset(strategy, dataset)
        return [part.shape for part in data.element_spec.values]

    assert row_counts(rows.batch(8)) == [(None,)] * 2
    assert row_counts(rows.batch(8, drop_remainder=True)) == [(2,)] * 2
    assert row_counts(rows.batch(6, drop_remainder=True)) == [(None,)] * 2


def test_reduce_and_passes():
    strategy = strategies_of(2)[1]
    data = distribute_dataset(strategy, numpy_dataset(np.arange(7)).batch(4))
    for _ in range(2):
        assert data.reduce(0, lambda total, x: total + x.sum()) == 2 + 3 + 6


def test_what_fit_reads_is_the_users_own():
    batches = numpy_dataset(np.arange(7)).batch(4)
    for strategy in strategies_of(2):
        data = distribute_dataset(strategy, batches)
        given = data.global_batches().get_numpy_iterator()
        assert [batch[0].tolist() for batch in given] == [
            [0, 1, 2, 3],
            [4, 5, 6],
        ]


def test_no_word_between_workers():
    strategies = strategies_of(2)
    for strategy in strategies:
        read(distribute_dataset(strategy, batches_of(9, 4)))
        assert strategy.executor.workers.num_collectives == 0

"""Workers' own datasets give each its batches, and all as many steps."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.contract import contract
from inputs.helpers import PER_REPLICA
from inputs.helpers import parts
from inputs.test_splits import PROPERTY
from inputs.workers import joined_steps
from inputs.workers import on_all
from inputs.workers import on_workers
from inputs.workers import read
from inputs.workers import read_global
from inputs.workers import strategies_of
from keras_dist.errors import WorkerLostError
from keras_dist.inputs.dataset import distribute_from_function
from keras_dist.inputs.sources.numpy_data import numpy_dataset
from parity.kinds import slices


def read_on(dataset_fn, num_workers=2, num_replicas=1, options=None):
    """The steps of each worker."""

    def steps(strategy):
        return read(distribute_from_function(strategy, dataset_fn, options))

    return on_all(strategies_of(num_workers, num_replicas), steps)


def of_own(*per_pipeline):
    """A function that gives each pipeline its own list of batches."""

    def dataset_fn(context):
        return [np.asarray(b) for b in per_pipeline[context.input_pipeline_id]]

    return dataset_fn


@contract(176)
def test_each_worker_has_a_pipeline():
    contexts = []

    def dataset_fn(context):
        contexts.append(context)
        return [np.ones(1)] * 2

    read_on(dataset_fn, num_workers=3, num_replicas=2)
    assert sorted(c.input_pipeline_id for c in contexts) == [0, 1, 2]
    assert {c.num_input_pipelines for c in contexts} == {3}
    assert {c.num_replicas_in_sync for c in contexts} == {6}
    assert contexts[0].get_per_replica_batch_size(12) == 2


@contract(188, 189)
def test_the_last_batch_of_data_that_the_user_shards():
    def dataset_fn(context):
        size = context.get_per_replica_batch_size(8)
        batches = slices(np.arange(14), size)
        return batches[context.input_pipeline_id :: context.num_input_pipelines]

    chief, other = read_on(dataset_fn)
    assert chief == [[[0, 1, 2, 3]], [[8, 9, 10, 11]]]
    assert other == [[[4, 5, 6, 7]], [[12, 13]]]


@contract(177, 190)
def test_static_batches_end_with_the_shortest():
    def dataset_fn(context):
        rows = np.arange(4 + 4 * context.input_pipeline_id)
        return numpy_dataset(rows).batch(2, drop_remainder=True)

    chief, other = read_on(dataset_fn)
    assert chief == other == [[[0, 1]], [[2, 3]]]


@contract(190)
@PROPERTY
@given(
    amounts=st.lists(
        st.lists(st.integers(0, 3), min_size=1, max_size=5),
        min_size=2,
        max_size=3,
    ),
    num_replicas=st.integers(1, 2),
)
def test_no_batch_is_lost_or_doubled(amounts, num_replicas):
    counter = itertools.count()
    batches = [
        [[next(counter) for _ in range(size)] for size in sizes]
        for sizes in amounts
    ]
    per_worker = read_on(of_own(*batches), len(amounts), num_replicas)
    (num_steps,) = {len(steps) for steps in per_worker}
    most = max(len(own) for own in batches)
    assert num_steps == -(-most // num_replicas)
    for own, steps in zip(batches, per_worker, strict=True):
        delivered = [part for step in steps for part in step]
        filled = num_steps * num_replicas - len(own)
        assert delivered == own + [[]] * filled


@contract(178, native=False)
def test_a_dataset_for_each_replica():
    contexts = []

    def dataset_fn(context):
        contexts.append(context)
        start = 10 * context.input_pipeline_id
        return [np.full((1,), start + i) for i in range(2)]

    chief, other = read_on(dataset_fn, 2, 2, PER_REPLICA)
    assert sorted(c.input_pipeline_id for c in contexts) == [0, 1, 2, 3]
    assert {c.num_input_pipelines for c in contexts} == {4}
    assert chief == [[[0], [10]], [[1], [11]]]
    assert other == [[[20], [30]], [[21], [31]]]


def test_empty_batches_keep_shapes_dtypes_and_structure():
    def dataset_fn(context):
        batch = {"x": np.ones((2, 3), "float32"), "y": (np.ones(2, "int8"),)}
        return [batch] * (1 + 2 * context.input_pipeline_id)

    def last(strategy):
        return list(distribute_from_function(strategy, dataset_fn))[-1]

    step, _ = on_all(strategies_of(2, 2), last)
    for part in parts(step["x"]):
        assert (part.shape, part.dtype) == ((0, 3), "float32")
    for part in parts(step["y"][0]):
        assert (part.shape, part.dtype) == ((0,), "int8")


@pytest.mark.runs_on("tensorflow")
def test_a_worker_with_no_data_knows_its_shapes_from_the_dataset():
    tf = pytest.importorskip("tensorflow")

    def dataset_fn(context):
        rows = tf.data.Dataset.range(3 * context.input_pipeline_id)
        return rows.map(lambda x: (tf.fill((4,), x), None)).batch(2)

    def first(strategy):
        data = distribute_from_function(strategy, dataset_fn)
        return [step[0].shape for step in data]

    chief, other = on_all(strategies_of(2), first)
    assert chief == [(0, 4), (0, 4)]
    assert other == [(2, 4), (1, 4)]


def test_a_worker_with_no_data_that_knows_nothing():
    """Every worker is told, and which one it is."""
    dataset_fn = of_own([[0], [1]], [])

    def steps(strategy):
        return read(distribute_from_function(strategy, dataset_fn))

    for outcome in on_workers(strategies_of(2), steps):
        assert isinstance(outcome, ValueError)
        assert "on worker 1 (127.0.0.1:9001)" in str(outcome)


@pytest.mark.runs_on("tensorflow")
def test_elements_that_can_not_be_cut():
    """Nobody has to, as long as workers have as many."""
    tf = pytest.importorskip("tensorflow")
    one = tf.sparse.from_dense([[1, 0], [0, 2]])

    def count(strategy, more):
        data = distribute_from_function(
            strategy, lambda c: [one] * (1 + more * c.input_pipeline_id)
        )
        return len(list(data))

    assert on_all(strategies_of(2), lambda s: count(s, 0)) == [1, 1]
    for outcome in on_workers(strategies_of(2), lambda s: count(s, 1)):
        assert isinstance(outcome, ValueError)
        assert "on worker 0 (127.0.0.1:9000), worker 1" in str(outcome)


def test_an_error_stops_all_workers():
    def dataset_fn(context):
        def batches():
            yield np.ones(1)
            if context.input_pipeline_id == 1:
                raise KeyError("of the user's own")
            yield np.ones(1)

        return batches

    received = []

    def steps(strategy):
        for step in distribute_from_function(strategy, dataset_fn):
            received.append(step)

    chief, other = on_workers(strategies_of(2), steps)
    assert isinstance(chief, WorkerLostError)
    assert "failed on worker 1 (127.0.0.1:9001)" in str(chief)
    assert isinstance(other, KeyError)
    # Both had the first step.
    assert len(received) == 2


def test_generators_and_second_passes():
    def generator_fn(context):
        return (np.full((1,), i) for i in range(2))

    def twice(strategy):
        data = distribute_from_function(strategy, generator_fn)
        steps = read(data)
        with pytest.raises(ValueError, match="can't be read again"):
            iter(data)
        return steps

    assert on_all(strategies_of(2), twice) == [[[[0]], [[1]]]] * 2

    def again(strategy):
        data = distribute_from_function(strategy, of_own([[0]], [[1], [2]]))
        return read(data), read(data)

    for first, second in on_all(strategies_of(2), again):
        assert first == second
        assert len(first) == 2


def test_how_many_steps():
    def counts(dataset_fn):
        return on_all(
            strategies_of(2),
            lambda s: distribute_from_function(s, dataset_fn).cardinality,
        )

    assert counts(of_own([[0], [1]], [[2], [3]])) == [2, 2]
    assert counts(of_own([[0], [1]], [[2]])) == [-2, -2]
    assert counts(lambda _: lambda: []) == [-2, -2]
    assert read_on(of_own([], [])) == [[], []]


@pytest.mark.parametrize("options", [None, PER_REPLICA])
def test_fit_reads_the_pipelines_of_all_workers(options):
    """In each step the rows that the workers would have, in their order."""

    def dataset_fn(context):
        index, count = context.input_pipeline_id, context.num_input_pipelines
        return slices(np.arange(17), 2)[index::count]

    def both(strategy):
        data = distribute_from_function(strategy, dataset_fn, options)
        return read(data), read_global(data), read_global(data)

    outcomes = on_all(strategies_of(2, 2), both)
    steps = joined_steps([own for own, _, _ in outcomes])
    assert sorted(sum(steps, [])) == list(range(17))
    for _, first, second in outcomes:
        assert first == second == steps


def test_fit_reads_without_a_word_between_workers():
    def dataset_fn(context):
        return [np.arange(2)] * (2 + context.input_pipeline_id)

    strategies = strategies_of(2)

    def rows(strategy):
        data = distribute_from_function(strategy, dataset_fn)
        before = strategy.executor.workers.num_collectives
        batches = read_global(data)
        assert strategy.executor.workers.num_collectives == before
        return batches

    expected = [[0, 1, 0, 1], [0, 1, 0, 1], [0, 1]]
    assert on_all(strategies, rows) == [expected] * 2

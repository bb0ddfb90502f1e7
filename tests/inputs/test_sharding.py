"""Workers read what the sharding policy of a `tf.data.Dataset` says."""

import gc
import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.contract import contract
from inputs.helpers import distributed
from inputs.helpers import installed
from inputs.helpers import lists
from inputs.test_splits import PROPERTY
from inputs.workers import joined_steps
from inputs.workers import on_all
from inputs.workers import on_workers
from inputs.workers import read
from inputs.workers import read_global
from inputs.workers import strategies_of
from keras_dist.inputs.dataset import data_for_fit
from keras_dist.inputs.dataset import distribute_dataset
from keras_dist.inputs.feed_choice import AutoShardPolicy
from keras_dist.inputs.sources.choice import TensorFlowSource
from keras_dist.inputs.sources.choice import TooFewFilesError

pytestmark = installed("tensorflow")
OFF, AUTO, FILE, DATA, HINT = AutoShardPolicy


@pytest.fixture(scope="module")
def tf():
    import tensorflow

    return tensorflow


def with_policy(dataset, policy):
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy(policy.value)
    )
    return dataset.with_options(options)


def numbers_in_files(folder, *files):
    """A dataset of the numbers in each of several new files."""
    import tensorflow as tf

    paths = []
    for index, numbers in enumerate(files):
        path = folder / f"{index}.txt"
        path.write_text("".join(f"{number}\n" for number in numbers))
        paths.append(str(path))
    lines = tf.data.TextLineDataset(paths)
    return lines.map(lambda line: tf.strings.to_number(line, tf.int32))


def read_on(dataset, num_workers=2, num_replicas=1):
    """The steps of each worker."""
    return on_all(
        strategies_of(num_workers, num_replicas),
        lambda strategy: read(distribute_dataset(strategy, dataset)),
    )


def test_the_numbers_are_those_of_the_original(tf):
    original = tf.data.experimental.AutoShardPolicy
    assert {p.name: p.value for p in AutoShardPolicy} == {
        p.name: p.value for p in original
    }


@contract(186)
@pytest.mark.parametrize(
    ("rows", "batch_size", "num_replicas", "expected"),
    [
        (12, 8, 1, [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9, 10, 11]]]),
        (8, 4, 1, [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]),
        (3, 8, 1, [[[0, 1, 2]]]),
        (12, 8, 2, [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]),
    ],
)
def test_off(tf, rows, batch_size, num_replicas, expected):
    dataset = with_policy(tf.data.Dataset.range(rows).batch(batch_size), OFF)
    assert read_on(dataset, num_replicas=num_replicas) == [expected] * 2


@contract(187)
@pytest.mark.parametrize("policy", [AUTO, DATA])
def test_auto_and_data_are_slices_of_each_batch(tf, policy):
    dataset = with_policy(tf.data.Dataset.range(5).batch(4), policy)
    assert read_on(dataset) == [[[[0, 1]], [[4]]], [[[2, 3]], [[]]]]


@contract(191, native=False)
def test_auto_does_not_look_for_files(tmp_path):
    """The same numbers with any number of workers, so the same as `DATA`."""
    dataset = numbers_in_files(tmp_path, [0, 1], [2, 3]).batch(2)
    assert read_on(dataset) == [[[[0]], [[2]]], [[[1]], [[3]]]]


def test_each_worker_reads_its_own_files(tmp_path):
    dataset = numbers_in_files(tmp_path, range(4), range(4, 8), range(8, 12))
    dataset = with_policy(dataset.batch(4), FILE)
    chief, other = read_on(dataset)
    assert chief == [[[0, 1]], [[2, 3]], [[8, 9]], [[10, 11]]]
    assert other == [[[4, 5]], [[6, 7]], [[]], [[]]]


@contract(191, native=False)
def test_fewer_files_than_workers(tmp_path):
    """An error on each worker, also on those that have no file to miss."""
    import tensorflow as tf

    def outcomes(dataset):
        return on_workers(
            strategies_of(3),
            lambda s: read(
                distribute_dataset(s, with_policy(dataset.batch(3), FILE))
            ),
        )

    for outcome in outcomes(numbers_in_files(tmp_path, [0], [1])):
        assert isinstance(outcome, TooFewFilesError)
        assert "at least 3 files" in str(outcome)
    for outcome in outcomes(tf.data.Dataset.range(4)):
        assert isinstance(outcome, ValueError)
        assert "reads no files" in str(outcome)


@contract(191, native=False)
def test_a_hint_is_replaced(tf):
    hint = tf.data.experimental.SHARD_HINT
    rows = tf.data.Dataset.range(9).shard(hint, hint)
    dataset = with_policy(rows.batch(2), HINT)
    chief, other = read_on(dataset)
    assert chief == [[[0]], [[2]], [[4]], [[6]], [[8]]]
    assert other == [[[1]], [[3]], [[5]], [[7]], [[]]]
    (alone,) = read_on(dataset, num_workers=1)
    assert alone == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]], [[8]]]


def test_a_hint_in_data_of_many_kinds(tf):
    """Ragged and sparse tensors, none, and functions that outlive them."""
    hint = tf.data.experimental.SHARD_HINT
    ragged = tf.ragged.constant([[1], [2, 3], [], [4]])
    sparse = tf.sparse.from_dense([[1, 0], [0, 2], [3, 0], [0, 0]])

    def doubled(x):
        return tf.numpy_function(lambda x: x * 2, [x], tf.int64)

    def elements(index):
        rows = tf.data.Dataset.range(4).map(doubled)
        data = tf.data.Dataset.from_tensor_slices((ragged, sparse))
        data = tf.data.Dataset.zip((data, rows)).batch(2)
        data = data.map(lambda pair, x: ({"r": pair[0], "s": pair[1]}, None, x))
        return TensorFlowSource(data.shard(hint, hint)).shard(HINT, 2, index)

    for index in range(2):
        source = elements(index)
        gc.collect()
        ((named, absent, rows),) = source.open()
        assert named["r"].to_list() == [[[1], [2, 3]], [[], [4]]][index]
        assert tf.sparse.to_dense(named["s"]).shape == (2, 2)
        assert absent is None
        assert rows.numpy().tolist() == [[0, 2], [4, 6]][index]
        assert source.known_spec()[1] is None


@contract(185, 190)
@PROPERTY
@given(
    files=st.lists(st.integers(0, 7), min_size=3, max_size=5),
    batch_size=st.integers(1, 6),
    num_workers=st.integers(2, 3),
    num_replicas=st.integers(1, 2),
)
def test_no_row_of_any_file_is_lost(
    tmp_path_factory, files, batch_size, num_workers, num_replicas
):
    edges = [0, *itertools.accumulate(files)]
    numbers = [range(a, b) for a, b in itertools.pairwise(edges)]
    folder = tmp_path_factory.mktemp("files")
    dataset = numbers_in_files(folder, *numbers).batch(batch_size)
    dataset = with_policy(dataset, FILE)
    per_worker = read_on(dataset, num_workers, num_replicas)
    assert len({len(steps) for steps in per_worker}) == 1
    for worker, steps in enumerate(per_worker):
        rows = [row for step in steps for part in step for row in part]
        own = [list(each) for each in numbers[worker::num_workers]]
        assert rows == sum(own, [])
        most = -(-batch_size // num_workers)
        assert all(sum(map(len, step)) <= most for step in steps)


def test_batches_of_several_sizes(tf):
    """As of `bucket_by_sequence_length`: each is cut by the largest so far."""
    rows = tf.data.Dataset.range(12)
    batches = (
        rows.take(2)
        .batch(2)
        .concatenate(rows.skip(2).take(6).batch(6))
        .concatenate(rows.skip(8).batch(2))
    )
    steps, _ = read_on(with_policy(batches, OFF))
    assert [len(part) for (part,) in steps] == [1, 1, 3, 3, 2, 2]
    assert sum((part for (part,) in steps), []) == list(range(12))


def test_data_without_end(tf):
    """The workers agree at the first step, and not again."""
    dataset = tf.data.Dataset.range(4).batch(4).repeat()
    dataset = with_policy(dataset, OFF)
    strategies = strategies_of(2)

    def first(strategy):
        data = distribute_dataset(strategy, dataset)
        assert data.cardinality == -1
        return [lists(step) for step in itertools.islice(data, 5)]

    expected = [[[0, 1]], [[2, 3]], [[0, 1]], [[2, 3]], [[0, 1]]]
    assert on_all(strategies, first) == [expected] * 2
    # One when it was made, and one in the pass.
    assert strategies[0].executor.workers.num_collectives == 2


def test_how_many_steps_and_what_shapes(tf):
    rows = tf.data.Dataset.range(8).batch(4, drop_remainder=True)

    def look(strategy):
        data = distribute_dataset(strategy, with_policy(rows, OFF))
        unbatched = with_policy(tf.data.Dataset.range(4), OFF)
        with pytest.raises(ValueError, match="batch first"):
            distribute_dataset(strategy, unbatched)
        return data.cardinality, data.element_spec.shape

    assert on_all(strategies_of(2), look) == [(-2, (None,))] * 2


@pytest.mark.parametrize("policy", [FILE, OFF, DATA])
def test_one_worker_reads_everything(tmp_path, policy):
    dataset = numbers_in_files(tmp_path, [0, 1], [2]).batch(2)
    data = distributed(with_policy(dataset, policy), 2)
    assert [lists(step) for step in data] == [[[0], [1]], [[2], []]]


def test_fit_reads_the_files_of_all_workers(tmp_path):
    dataset = numbers_in_files(tmp_path, range(4), range(4, 7))
    dataset = with_policy(dataset.batch(4), FILE)

    def both(strategy):
        data = distribute_dataset(strategy, dataset)
        return read(data), read_global(data), read_global(data)

    outcomes = on_all(strategies_of(2, 2), both)
    steps = joined_steps([own for own, _, _ in outcomes])
    assert steps == [[0, 1, 4, 5], [2, 3, 6]]
    for _, first, second in outcomes:
        assert first == second == steps


def test_fit_with_a_policy(tf):
    """A plain dataset is read as on one device, but for what can't be."""
    strategies = strategies_of(2)
    plain = tf.data.Dataset.range(4).batch(2)
    for policy in (AUTO, DATA, FILE):
        dataset = with_policy(plain, policy)
        assert data_for_fit(strategies[0], dataset) is dataset
    off = with_policy(plain, OFF)
    assert data_for_fit(strategies_of(1)[0], off) is off
    with pytest.raises(ValueError, match="2 workers reads data of its own"):
        data_for_fit(strategies[0], off)
    arrays = np.ones(3)
    assert data_for_fit(strategies[0], arrays) is arrays


def test_fit_with_the_policy_off_of_distributed_data(tf):
    dataset = with_policy(tf.data.Dataset.range(4).batch(2), OFF)

    def refused(strategy):
        data = distribute_dataset(strategy, dataset)
        with pytest.raises(ValueError, match=re.escape("`strategy.run`")):
            data_for_fit(strategy, data)

    on_all(strategies_of(2), refused)


def test_fit_with_a_hint(tf):
    hint = tf.data.experimental.SHARD_HINT
    rows = tf.data.Dataset.range(5).shard(hint, hint)
    dataset = with_policy(rows.batch(4), HINT)

    def rows_of_fit(strategy):
        batches = data_for_fit(strategy, dataset).get_numpy_iterator()
        return [batch[0].tolist() for batch in batches]

    expected = [[0, 2, 1, 3], [4]]
    assert on_all(strategies_of(2), rows_of_fit) == [expected] * 2

"""`strategy.explain` tells what replicas really get."""

import contextlib

import keras
import numpy as np
import pytest

import keras_dist
from inputs.helpers import BACKEND
from inputs.helpers import installed
from inputs.helpers import parts
from inputs.helpers import strategy_of
from inputs.workers import on_all
from inputs.workers import strategies_of
from parity.harness import JIT

SIZES = (1, 3, 4, 8, 9, 10)
MAKES = {
    "mirrored": lambda: strategy_of(4),
    "three": lambda: strategy_of(3),
    "central": lambda: keras_dist.CentralStorageStrategy(
        ["cpu:0", "cpu:1"], "cpu:3"
    ),
    "one device": lambda: keras_dist.OneDeviceStrategy("cpu:1"),
}


def numbered(rows):
    """Rows that tell which they are, from 1: padding is 0."""
    return np.arange(1, rows + 1, dtype="float32")


def told(explanation):
    """The numbers of each replica's rows, as told."""
    return [[float(i + 1) for i in row.rows] for row in explanation.rows]


class Recorder(keras.Model):
    """Notes what its steps are given, on each replica."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.seen = {}

    def call(self, x):
        return self.dense(x)

    def train_step(self, *arguments):
        x, _ = arguments[-1]
        context = keras_dist.get_replica_context()
        replica = context.replica_id_in_sync_group if context else 0
        self.seen[int(replica)] = keras.ops.convert_to_numpy(x)[:, 0].tolist()
        return super().train_step(*arguments)


@contextlib.contextmanager
def cut_on_jax(seen):
    """Notes which rows of an input `fit` puts on which device."""
    from keras_dist_jax.placement import batches

    def noting(put):
        def noted(leaf, *where):
            array = put(leaf, *where)
            # A layout, or a sharding and the devices.
            devices = where[-1] if len(where) == 2 else where[0].devices
            held = {s.device: s.data for s in array.addressable_shards}
            for index, device in enumerate(devices):
                rows = np.asarray(held[device])
                if rows.ndim == 2:
                    seen[index] = [row for row in rows[:, 0].tolist() if row]
            return array

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for name in ("put_sharded", "put_whole"):
            patch.setattr(batches, name, noting(getattr(batches, name)))
        yield


def seen_in_fit(strategy, rows):
    """What replicas get of a batch in `fit`, by replica."""
    x = numbered(rows)[:, np.newaxis]
    if BACKEND == "jax":
        seen = {}
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("sgd", "mse", jit_compile=JIT)
        with cut_on_jax(seen):
            model.fit(x, x[:, 0], batch_size=rows, shuffle=False, verbose=0)
        # On one device batches go to it as they are.
        return seen or {0: x[:, 0].tolist()}
    with strategy.scope():
        model = Recorder()
        model.compile("sgd", "mse", run_eagerly=True)
    # The first step of a model with code of its own may be split unevenly.
    for _ in range(2):
        model.fit(x, x[:, 0], batch_size=rows, shuffle=False, verbose=0)
    return model.seen


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_fit_gives_replicas_these_rows(make):
    strategy = make()
    for rows in SIZES:
        x = numbered(rows)[:, np.newaxis]
        explanation = strategy.explain(x, x[:, 0], batch_size=rows)
        seen = seen_in_fit(strategy, rows)
        for row, numbers in zip(
            explanation.rows, told(explanation), strict=True
        ):
            # One without rows computes nothing, or what counts nowhere.
            if numbers:
                assert seen[row.replica] == numbers
        assert explanation.num_rows == rows
        assert explanation.reader == "fit"


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_replica_functions_get_these_rows(make):
    strategy = make()
    batches = [numbered(rows) for rows in SIZES]
    iterator = iter(strategy.experimental_distribute_dataset(batches))
    for rows in SIZES:
        explanation = strategy.explain(iterator)
        element = next(iterator)
        given = strategy.run(lambda x: x * 1.0, args=(element,))
        assert [each.tolist() for each in parts(given)] == told(explanation)
        assert told(strategy.explain(element)) == told(explanation)
        assert explanation.num_rows == rows
        assert explanation.reader == "run"
    with pytest.raises(ValueError, match="no batch to explain"):
        strategy.explain(iterator)


def test_fit_and_run_differ_only_where_it_says_so():
    strategy = strategy_of(4)
    for rows in SIZES:
        in_fit = strategy.explain(numbered(rows))
        dataset = strategy.experimental_distribute_dataset([numbered(rows)])
        in_run = strategy.explain(dataset)
        differ = told(in_fit) != told(in_run)
        sizes = ", ".join(str(row.num_rows) for row in in_fit.rows)
        note = f"`fit` gives the replicas {sizes} of these rows."
        assert in_run.notes == ((note,) if differ else ())


def test_each_replica_is_told_of():
    strategy = strategy_of(2)
    x = {"a": np.ones((20, 3)), "b": np.ones((20, 2, 2))}
    explanation = strategy.explain(x, np.ones(20), np.ones(20), batch_size=5)
    first, second = explanation.rows
    assert (first.worker, first.replica, first.device) == (0, 0, "cpu:0")
    assert (first.first, first.last, first.num_rows) == (0, 2, 3)
    assert first.shape == ({"a": (3, 3), "b": (3, 2, 2)}, (3,), (3,))
    assert (second.worker, second.replica, second.device) == (0, 1, "cpu:1")
    assert (second.first, second.last, second.num_rows) == (3, 4, 2)
    assert second.shape == ({"a": (2, 3), "b": (2, 2, 2)}, (2,), (2,))
    assert list(explanation) == list(explanation.rows)


def test_a_replica_without_rows():
    function = keras_dist.Strategy.distribute_datasets_from_function
    dataset = function(strategy_of(2), lambda context: [np.ones((3, 2))])
    explanation = strategy_of(2).explain(dataset)
    row = explanation.rows[1]
    assert (row.first, row.last, row.num_rows) == (None, None, 0)
    assert row.shape == (0, 2)
    assert "none" in str(explanation)


def test_batches_that_are_cut_as_the_backend_does():
    explanation = strategy_of(4).explain(np.ones((2, 1)))
    counts = [row.num_rows for row in explanation.rows]
    assert counts == ([2] * 4 if BACKEND == "jax" else [1, 0, 1, 0])
    said = "each replica computes all" in "".join(explanation.notes)
    assert said == (BACKEND == "jax")
    # Unequal arrays are not cut.
    batch = {"a": np.ones((3, 2)), "b": np.ones((7, 4))}
    explanation = strategy_of(2).explain(batch)
    first, second = explanation.rows
    assert first.shape == {"a": (3, 2), "b": (7, 4)}
    assert first.num_rows == explanation.num_rows == 7
    assert second.num_rows == (7 if BACKEND == "jax" else 0)
    assert "different numbers of rows" in explanation.notes[0]


def test_it_is_a_table_to_look_at(capsys):
    explanation = strategy_of(2).explain(np.ones((5, 3)))
    explanation.show()
    text = str(explanation)
    assert capsys.readouterr().out.rstrip() == text
    lines = [line.split() for line in text.splitlines()]
    assert ["0", "1", "cpu:1", "3", "to", "4", "2", "(2,", "3)"] in lines
    assert repr(explanation) == "<Explanation of 5 rows: 3, 2>"


class Sequence(keras.utils.PyDataset):
    """Batches of 5, 4, 3, ... rows."""

    num_begun = 0

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return numbered(5 - index), numbered(5 - index)

    def on_epoch_begin(self):
        self.num_begun += 1


def of_generator():
    return (numbered(rows) for rows in (5, 4))


def test_no_batch_is_consumed_without_saying_so():
    strategy, sequence = strategy_of(2), Sequence()
    explanation = strategy.explain(sequence)
    assert told(explanation) == [[1, 2, 3], [4, 5]]
    assert sequence.num_begun == 0
    assert not explanation.notes
    generator = of_generator()
    explanation = strategy.explain(generator)
    assert explanation.num_rows == 5
    assert "took this batch" in explanation.notes[0]
    assert [len(batch) for batch in generator] == [4]
    with pytest.raises(ValueError, match="no batch left"):
        strategy.explain(generator)
    dataset = strategy.experimental_distribute_dataset(of_generator())
    for _ in range(2):
        assert strategy.explain(dataset).num_rows == 5
    sizes = [[len(part) for part in parts(each)] for each in dataset]
    assert sizes == [[3, 2], [2, 2]]
    # A list of batches is a dataset, as for that method.
    batches = [(np.ones((4, 3)), np.ones(4)), (np.ones((1, 3)), np.ones(1))]
    explanation = strategy.explain(batches)
    assert [row.num_rows for row in explanation] == [2, 2]
    assert explanation.rows[0].shape == ((2, 3), (2,))


@installed("tensorflow")
def test_tf_data():
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices(numbered(9)).batch(5)
    explanation = strategy_of(2).explain(dataset)
    assert told(explanation) == [[1, 2, 3], [4, 5]]
    assert explanation.rows[0].shape == (3,)
    with pytest.raises(ValueError, match="not batched"):
        strategy_of(2).explain(dataset.unbatch())


@installed("torch")
def test_a_loader_is_shuffled_as_if_nothing_had_been_read():
    import torch

    loader = torch.utils.data.DataLoader(
        torch.arange(20), batch_size=5, shuffle=True
    )
    torch.manual_seed(3)
    expected = [batch.tolist() for batch in loader]
    torch.manual_seed(3)
    explanation = strategy_of(2).explain(loader)
    assert [row.num_rows for row in explanation.rows] == [3, 2]
    if BACKEND == "torch":
        assert [batch.tolist() for batch in loader] == expected


def test_what_is_drawn_later_is_the_same():
    def shuffled():
        yield np.random.permutation(5)

    np.random.seed(4)
    expected = np.random.random()
    np.random.seed(4)
    assert strategy_of(2).explain(shuffled).num_rows == 5
    assert np.random.random() == expected


def test_rows_of_other_workers():
    def explain(strategy):
        dataset = strategy.experimental_distribute_dataset([numbered(10)])
        return strategy.explain(numbered(10)), strategy.explain(dataset)

    strategies = strategies_of(2, 2)
    parts = [[1, 2, 3], [4, 5], [6, 7, 8], [9, 10]]
    for worker, found in enumerate(on_all(strategies, explain)):
        devices = [None, None, None, None]
        devices[2 * worker : 2 * worker + 2] = ["cpu:0", "cpu:1"]
        for explanation in found:
            assert told(explanation) == parts
            assert [row.worker for row in explanation.rows] == [0, 0, 1, 1]
            assert [row.device for row in explanation.rows] == devices


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((of_generator(),), {"batch_size": 4}, "with arrays only"),
        ((Sequence(), np.ones(3)), {}, "with arrays only"),
        ((np.ones(3),), {"batch_size": 0}, "at least 1"),
        ((np.ones(3), np.ones(2)), {"batch_size": 2}, "same number of rows"),
        ((np.float32(3.0),), {}, "not batched"),
        ((3.5j,), {}, "can't read its data"),
        (([], []), {}, "There is no batch"),
    ],
)
def test_what_can_not_be_explained(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        strategy_of(2).explain(*arguments, **options)


def test_it_is_for_cross_replica_context():
    strategy = strategy_of(2)
    with pytest.raises(RuntimeError):
        strategy.run(lambda: strategy.explain(np.ones(3)))

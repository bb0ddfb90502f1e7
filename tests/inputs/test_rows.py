"""`Rows`: batches of anything with a length and an index."""

import threading

import keras
import numpy as np
import pytest

import keras_dist
from parity import models
from parity.harness import JIT
from parity.harness import assert_same
from parity.harness import fitted
from parity.harness import scope
from parity.harness import set_initial_weights

TABLE = [(np.float32([i, -i]), np.float32([i % 3])) for i in range(11)]


def read(rows):
    """The first numbers of an epoch's rows, batch by batch."""
    rows.on_epoch_begin()
    return [rows[i][0][:, 0].tolist() for i in range(rows.num_batches)]


def test_batches_in_order():
    rows = keras_dist.Rows(TABLE, batch_size=4)
    assert read(rows) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    x, y = rows[2]
    assert (x.shape, y.shape, x.dtype) == ((3, 2), (3, 1), np.float32)


def test_each_epoch_has_an_order_of_its_own():
    def epochs(**options):
        rows = keras_dist.Rows(TABLE, batch_size=4, shuffle=True, **options)
        return [read(rows) for _ in range(2)]

    one, other = epochs(seed=1)
    assert one != other
    assert epochs(seed=1) == [one, other]
    assert sorted(sum(one, [])) == list(range(11))
    np.random.seed(5)
    first = epochs()
    np.random.seed(5)
    assert epochs() == first != epochs()


def test_rows_are_transformed_and_stacked():
    source = [{"image": np.full((2, 2), i), "label": i} for i in range(5)]
    rows = keras_dist.Rows(
        source,
        batch_size=3,
        transform=lambda row: ({"a": row["image"]}, row["label"]),
    )
    inputs, labels = rows[0]
    assert inputs["a"].shape == (3, 2, 2)
    assert labels.tolist() == [0, 1, 2]
    uneven = keras_dist.Rows([np.ones(2), np.ones(3)], batch_size=2)
    with pytest.raises(ValueError, match=r"Received: \(2,\) and \(3,\)"):
        uneven[0]


def test_threads_load_the_rows_of_a_batch():
    barrier = threading.Barrier(3, timeout=30)

    class Slow(list):
        def __getitem__(self, index):
            barrier.wait()
            return super().__getitem__(index)

    rows = keras_dist.Rows(Slow(TABLE[:9]), batch_size=3, threads=3)
    assert read(rows) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_rows_that_are_loaded_together():
    class Together(list):
        def __getitems__(self, indices):
            return [self[i] for i in indices]

        def __getitem__(self, index):
            assert isinstance(index, int)
            return super().__getitem__(index)

    assert read(keras_dist.Rows(Together(TABLE), batch_size=6))[1] == [
        *(6, 7, 8, 9, 10)
    ]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((iter(TABLE), {"batch_size": 2}), TypeError, "without `__len__`"),
        (({1}, {"batch_size": 2}), TypeError, "a set, without `__getitem__`"),
        (([], {"batch_size": 2}), ValueError, "list of length 0"),
        ((TABLE, {"batch_size": 0}), ValueError, "batch_size=0"),
        (
            (TABLE, {"batch_size": 2, "threads": 1.5}),
            ValueError,
            "threads=1.5",
        ),
    ],
)
def test_bad_arguments(arguments, error, text):
    source, options = arguments
    with pytest.raises(error, match=text):
        keras_dist.Rows(source, **options)


def test_fit_on_two_devices_is_that_of_one():
    data = models.table(11)
    source = list(zip(data["x"], data["y"], strict=True))

    def outcome(count):
        keras.utils.set_random_seed(3)
        with scope(count):
            model = set_initial_weights(models.mlp())
            model.compile("sgd", "mse", jit_compile=JIT)
        rows = keras_dist.Rows(source, batch_size=4, shuffle=True)
        return fitted(model, rows, epochs=2, verbose=0)

    assert_same(outcome(2), outcome(None))


def test_other_libraries_datasets():
    grain = pytest.importorskip("grain")
    mapped = grain.MapDataset.source(TABLE).shuffle(seed=1)
    rows = keras_dist.Rows(mapped, batch_size=11)
    assert sorted(read(rows)[0]) == list(range(11))

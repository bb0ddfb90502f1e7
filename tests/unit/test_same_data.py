"""Workers that are given different data are told, by little of it."""

import keras
import numpy as np
import pytest

from keras_dist.errors import ReplicaDivergenceError
from keras_dist.fit.workers import same_data
from keras_dist.fit.workers.same_data import check_arrays
from keras_dist.fit.workers.same_data import fingerprint
from keras_dist.plugin.executor import with_first_seen
from unit.test_togetherness import MadeUp

RANDOM = np.random.default_rng(3)
X = RANDOM.normal(size=(50, 7)).astype("float32")
IMAGES = np.zeros((40, 28, 28, 1), "float32")
IMAGES[:, 10:20, 10:20] = RANDOM.uniform(size=(40, 10, 10, 1))
DIFFERENT = {
    "floats": (X, X[::-1]),
    "images with empty borders": (IMAGES, np.roll(IMAGES, 1, axis=0)),
    "one label": (np.arange(9), np.arange(9) + (np.arange(9) == 3)),
    "strings": (np.array(["a", "b"]), np.array(["a", "c"])),
    "objects": (
        np.array(["a", "bc"], "object"),
        np.array(["a", "bd"], "object"),
    ),
    "the last row": (X, np.concatenate([X[:-1], X[:1]])),
    "structure": ((X, None), (X, X)),
    "width": (np.zeros((3, 2)), np.zeros((3, 4))),
    "scale": (X, 2 * X),
    "dates": (
        np.array(["2026-01-01"], "M8[D]"),
        np.array(["2026-01-02"], "M8"),
    ),
    "numbers": ([1.0, 2.0], [1.0, 3.0]),
}


def compared(one, other):
    """Compares two workers' arrays, on worker 0."""
    told = fingerprint(other)
    check_arrays({"x": one}, MadeUp(others=lambda own: [told]))


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_data(name):
    one, other = DIFFERENT[name]
    with pytest.raises(ReplicaDivergenceError, match="another `x` on worker 1"):
        compared(one, other)
    for data in DIFFERENT[name]:
        compared(data, data)


def test_bits_and_kinds_of_arrays_do_not_matter():
    compared(X, np.nextafter(X, np.float32(np.inf)))
    assert fingerprint(keras.ops.convert_to_tensor(X)) == fingerprint(X)
    # What is not a number equals itself.
    holes = np.where(X > 1, np.nan, X)
    compared(holes, holes.copy())
    assert all(abs(n) < 2**31 for n in fingerprint([holes, X * 1e30, X * 0]))


def test_little_of_much_is_looked_at():
    """Rows are cut before anything is copied from a device."""

    class Watched:
        shape, taken = (10**6, 10**5), 0

        def __getitem__(self, rows):
            Watched.taken += len(range(*rows.indices(self.shape[0])))
            return np.ones((1, 4))

    fingerprint(Watched())
    assert Watched.taken == 2


def test_the_first_batch_is_neither_lost_nor_read_twice():
    seen = []
    batches = with_first_seen(iter("abc"), seen.append)
    assert seen == []
    assert next(batches) == "a"
    assert seen == ["a"]
    assert list(batches) == ["b", "c"]


def test_one_without_data_tells_the_others():
    seen = []
    assert list(with_first_seen([], seen.append)) == []
    assert seen == [None]
    with pytest.raises(ReplicaDivergenceError, match="is empty"):
        compared(None, X)


def test_it_can_be_left_out(monkeypatch):
    assert same_data.is_wanted()
    monkeypatch.setenv("KERAS_DIST_CHECK_DATA", "0")
    assert not same_data.is_wanted()

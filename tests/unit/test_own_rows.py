"""The parts of data of which a worker has its own rows only."""

import random
import threading

import numpy as np
import pytest

import keras_dist
from keras_dist.core.rows import OwnRows
from keras_dist.inputs.own_rows import adapters
from keras_dist.inputs.own_rows.randomness import OwnRandomness
from keras_dist.inputs.own_rows.shares import OwnTaker
from keras_dist.inputs.own_rows.shares import RowOrder
from keras_dist.inputs.own_rows.shares import Taken
from keras_dist.inputs.own_rows.shares import code_of
from parity.harness import BACKEND

X = np.arange(24.0).reshape(12, 2)


class Halves:
    """The shares of the second of two workers."""

    first_replica = 1

    def of(self, total):
        return range(-(-total // 2), total)


def own_rows(first=4, last=8):
    return OwnRows(X[first:last], first, len(X))


def test_a_leaf_has_the_shape_of_the_global_batch():
    leaf = own_rows()
    assert (leaf.shape, leaf.dtype, leaf.ndim) == (X.shape, X.dtype, 2)
    assert len(leaf) == 12
    np.testing.assert_equal(leaf[4:8], X[4:8])
    np.testing.assert_equal(leaf[5:7], X[5:7])
    assert leaf[9:9].shape == (0, 2)
    assert leaf[13:20].shape == (0, 2)
    doubled = leaf.map(lambda rows: rows * 2)
    np.testing.assert_equal(doubled[4:8], X[4:8] * 2)


@pytest.mark.parametrize(
    "read",
    [
        lambda leaf: leaf[:],
        lambda leaf: leaf[3:8],
        lambda leaf: leaf[4:9],
        lambda leaf: leaf[4:8:2],
        lambda leaf: leaf[5],
        np.asarray,
        list,
    ],
)
def test_other_rows_are_an_error(read):
    with pytest.raises(
        (IndexError, TypeError), match="Expected: rows from 4 to 8"
    ):
        read(own_rows())


@pytest.mark.skipif(BACKEND != "tensorflow", reason="of TensorFlow's leaf")
def test_other_rows_are_an_error_in_a_graph():
    import tensorflow as tf

    from keras_dist_tensorflow.batches import OwnRowsTensor

    leaf = OwnRowsTensor(tf.constant(X[4:8]), 4, 12, 0)
    assert leaf.shape.as_list() == [None, 2]

    @tf.function
    def part(leaf, start, stop):
        return leaf.part(start, stop)

    def rows(*edges):
        return part(leaf, *map(tf.constant, edges)).numpy()

    np.testing.assert_equal(rows(5, 8), X[5:8])
    # A replica without rows gets one that is here.
    np.testing.assert_equal(rows(12, 12), X[4:5])
    for edges in ((3, 8), (4, 9), (0, 2)):
        with pytest.raises(tf.errors.InvalidArgumentError):
            rows(*edges)


@pytest.mark.skipif(BACKEND != "jax", reason="Keras sends ahead on JAX only")
def test_keras_does_not_send_own_rows_ahead(monkeypatch):
    """As it does with accelerators."""
    import jax
    from keras.src.backend.jax.trainer import JAXEpochIterator

    iterator = JAXEpochIterator(x=X, batch_size=4)
    adapter = adapters.own_rows_of(
        iterator.data_adapter, Halves(), OwnRows, compares=False
    )
    executor = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"]).executor
    executor.read_from(iterator, adapter)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    leaves = list(iterator._get_iterator())
    assert [type(leaf) for leaf in leaves] == [OwnRows] * 3
    np.testing.assert_equal(leaves[1][2:4], X[6:8])


def test_the_taker_takes_of_anything_with_a_length():
    own = OwnTaker(Halves())
    assert own(range(5)) == range(3, 5)
    assert own(list("abcde")) == ["d", "e"]
    assert own.taken.numbers[:3] == (3, 2, 5)
    with pytest.raises(ValueError, match="Received: 5 items, then 4"):
        own([1, 2, 3, 4])
    with pytest.raises(ValueError, match="empty sequence"):
        OwnTaker(Halves())([])
    assert OwnTaker(None)([7, 8]) == [7, 8]


def test_batches_of_other_lengths_are_an_error():
    taken = Taken(3, 2, 5, 0)
    taken.check((X[:2], None, 1.0, {"name": "x"}))
    with pytest.raises(ValueError, match=r"shape \(5, 2\), where rows 3 to 5"):
        taken.check((X[:2], X[:5]))


def test_a_data_set_that_does_not_call_own_is_told():
    import keras

    class Forgot(keras.utils.PyDataset):
        def __len__(self):
            return 1

        def __getitem__(self, index, own=None):
            return X, X

    assert adapters.why_all(Forgot()) == ""
    with pytest.raises(ValueError, match="of Forgot has a parameter"):
        adapters.OwnPyDataset(Forgot(), Halves())[0]


def test_codes_tell_orders_apart():
    one = code_of([3, 1, 2])
    assert one == code_of([3, 1, 2]) == code_of(np.array([3, 1, 2]))
    assert one != code_of([1, 3, 2])
    assert code_of(["a", "b"]) != code_of(["b", "a"])
    # Objects are known by their addresses only.
    assert code_of([object()]) == code_of([object()])
    assert code_of(X) == code_of(X + 1)


def pairs(*codes):
    return [((X[:1],), Taken(0, 1, 2, code).numbers) for code in codes]


def test_an_order_counts_batches_as_they_are_read():
    one, other = RowOrder(2, is_ahead=False), RowOrder(2, is_ahead=False)
    reading = one.noted(pairs(5, 6))
    assert one.code == other.code
    next(reading)
    assert one.code != other.code
    other.note(5)
    assert one.code == other.code


@pytest.mark.parametrize("size", [2, None])
def test_what_is_read_ahead_counts_when_it_was_asked_for(size):
    order = RowOrder(size, is_ahead=True)
    order.end()
    order.begin()
    list(order.noted(pairs(5, 6)))
    ahead = order.noted(pairs(7, 8))
    next(ahead)
    assert order.code == 0
    order.end()
    first = order.code
    assert first
    list(ahead)
    order.begin()
    assert order.code == first
    order.end()
    assert order.code != first


def test_own_loads_leave_random_states_alone():
    np.random.seed(1)
    random.seed(1)
    randomness = OwnRandomness(1)
    expected = np.random.RandomState(1).uniform(size=2)
    with randomness.apart():
        assert np.random.uniform() not in expected
    assert np.random.uniform() == expected[0]
    assert random.random() == random.Random(1).random()


def test_loads_that_draw_draw_anew_each_time():
    def draws(first_replica, number=3):
        random.seed(2)
        randomness = OwnRandomness(first_replica)
        with randomness.alike():
            seen = [random.random()]
        for _ in range(number):
            with randomness.apart():
                seen.append(np.random.uniform())
        return seen, random.random()

    assert draws(0) == draws(0)
    (one, after), (other, after_other) = draws(0), draws(1)
    assert one[0] == other[0]
    assert len({*one, *other}) == 7
    assert after == after_other


def test_another_thread_does_not_disturb_the_program():
    """Unless the source was seen to draw there."""
    random.seed(3)
    quiet, drawing = OwnRandomness(0), OwnRandomness(0)
    for randomness in (quiet, drawing):
        with randomness.apart():
            if randomness is drawing:
                random.random()

    def seen(randomness):
        states = []

        def load():
            with randomness.apart():
                states.append(random.getstate())

        before = random.getstate()
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
        return states == [before]

    assert seen(quiet)
    assert not seen(drawing)


def test_why_all_rows_are_read():
    import keras

    class Whole(keras.utils.PyDataset):
        def __getitem__(self, index):
            return X

    assert adapters.why_all((X, {"a": X})) == ""
    assert "of Whole has no `own`" in adapters.why_all(Whole())
    assert "generator gives whole" in adapters.why_all(x for x in [X])


@pytest.mark.skipif(BACKEND != "torch", reason="PyTorch's data is enough once")
def test_why_all_rows_of_a_loader_are_read():
    from torch.utils import data

    class Stream(data.IterableDataset):
        def __iter__(self):
            yield from X

    class Own(data.DataLoader):
        def __iter__(self):
            return iter([X])

    class Short(data.DataLoader):
        def __len__(self):
            return 2

    def why(loader):
        return adapters.why_all(loader)

    assert why(data.DataLoader(X, batch_size=2)) == ""
    assert "IterableDataset" in why(data.DataLoader(Stream()))
    assert "batch_size=None" in why(data.DataLoader(X, batch_size=None))
    assert "Own has a `__iter__` of its own" in why(Own(X))
    assert "Short has a `__len__` of its own" in why(Short(X))
    loader = data.DataLoader(X, collate_fn=np.stack)
    assert "set `loader.own_rows = True`" in why(loader)
    loader.own_rows = True
    assert why(loader) == ""

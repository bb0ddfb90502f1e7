"""Batches are copied to a GPU while it computes; here the GPU is made up."""

import threading

import keras
import numpy as np
import pytest
import torch

import keras_dist
from keras_dist_torch import prefetch

BATCHES = 5


class Device:
    """A device whose steps end when all that may be copied ahead is there."""

    def __init__(self, ahead):
        self._ahead = ahead
        self._changed = threading.Condition()
        self.copied, self.computed = [], []

    def send(self, batch):
        with self._changed:
            self.copied.append(batch)
            self._changed.notify_all()
        return lambda: batch

    def compute(self, batch):
        wanted = min(batch + 1 + self._ahead, BATCHES)
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: len(self.copied) >= wanted, timeout=100
            )
        self.computed.append(batch)
        assert arrived
        # No more than these, however long a step takes.
        assert self.copied == list(range(wanted))


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_the_next_batches_are_copied_during_a_step(ahead):
    device = Device(ahead)
    for batch in prefetch.sent_ahead(range(BATCHES), device.send, ahead):
        device.compute(batch)
    assert device.computed == device.copied == list(range(BATCHES))


def test_a_loop_that_ends_early_leaves_no_thread():
    device = Device(2)
    batches = prefetch.sent_ahead(range(BATCHES), device.send, 2)
    device.compute(next(batches))
    batches.close()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("keras_dist_reader")]


def test_an_error_comes_where_its_batch_would():
    def failing():
        yield 0
        yield 1
        raise OSError("no more")

    done = []
    with pytest.raises(OSError, match="no more"):
        for batch in prefetch.sent_ahead(failing(), Device(2).send, 2):
            done.append(batch)
    assert done == [0, 1]


class Lane:
    """Stands for the stream that copies to a GPU."""

    def __init__(self, device):
        self.sent = []
        LANES.append(self)

    def send(self, batch):
        leaves = keras.tree.flatten(batch)
        self.sent.append([(leaf.device.type, len(leaf)) for leaf in leaves])
        return lambda: batch


LANES = []


@pytest.fixture
def gpu(monkeypatch):
    """Makes `fit` take the CPU for a GPU, as far as batches go."""
    LANES.clear()
    monkeypatch.setattr(prefetch, "LEAST_SIZE", 0)
    monkeypatch.setattr(prefetch, "Lane", Lane)
    to_gpu = prefetch.to_gpu
    monkeypatch.setattr(
        prefetch,
        "to_gpu",
        lambda device, executor: to_gpu(torch.device("cuda"), executor),
    )


def fitted(data, **settings):
    keras.utils.set_random_seed(1)
    strategy = keras_dist.OneDeviceStrategy("cpu:0")
    strategy.batches_ahead = settings.pop("ahead", 1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(*data, verbose=0, shuffle=False, **settings)
    return model.get_weights()


X = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")
Y = X[:, :1].copy()


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_fit_sends_batches_ahead_with_the_same_numbers(gpu, ahead):
    found = fitted((X, Y), batch_size=4, epochs=2, ahead=ahead)
    # Keras looks at the first batch, to build the optimizer.
    looked, *epochs = [lane.sent for lane in LANES if lane.sent]
    assert len(looked) <= ahead + 1
    assert epochs == 2 * [[2 * [("cpu", n)] for n in (4, 4, 2)]]
    for got, want in zip(found, plain(), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("least", [16, 17])
def test_small_batches_are_left_to_keras(gpu, monkeypatch, least):
    monkeypatch.setattr(prefetch, "LEAST_SIZE", least)
    # Each of 4 rows has 3 features and a label.
    fitted((X, Y), batch_size=4)
    assert bool(LANES) is (least == 16)


def plain():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


def test_a_generator_is_not_read_ahead(gpu):
    read = []

    def batches():
        while True:
            read.append(len(read))
            yield X[:4], Y[:4]

    source = batches()
    fitted((source,), steps_per_epoch=3, epochs=2, ahead=2)
    assert len(read) == 6


def test_gradients_are_kept():
    value = torch.ones(2, requires_grad=True)
    prefetch.sent(value, torch.device("cpu")).sum().backward()
    assert value.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("number", [-1, 3, True, "1", None])
def test_other_numbers_are_refused(number):
    strategy = keras_dist.OneDeviceStrategy("cpu:0")
    with pytest.raises(ValueError, match="0, 1 or 2"):
        strategy.batches_ahead = number
    assert strategy.batches_ahead == 1

"""Heartbeats, over a blackboard in memory."""

import threading

from keras_dist.core.cluster import Cluster
from keras_dist.plugin.heartbeats import Blackboard
from keras_dist.plugin.heartbeats import Heartbeats

ADDRESSES = ("127.0.0.1:1", "127.0.0.1:2")


class Memory(Blackboard):
    """A blackboard that can be held up, as a network can."""

    def __init__(self):
        self.texts = {}
        self.is_open = threading.Event()
        self.is_open.set()
        self.is_read = threading.Event()

    def write(self, key, text):
        self.texts[key] = text

    def read(self, keys):
        self.is_read.set()
        self.is_open.wait()
        return [self.texts.get(key, "") for key in keys]


def beats_of(index, board, silence=1.0):
    cluster = Cluster(index, leader=ADDRESSES[0], addresses=ADDRESSES)
    return Heartbeats(cluster, board, keeper=0, silence=silence)


def test_the_others_are_told_why_a_worker_ends():
    board = Memory()
    # A sign of life has seconds to come, though it comes at once.
    first, second = (beats_of(i, board, silence=100.0) for i in range(2))
    first.start()
    second.start()
    second.stop("ended with ValueError: no", patience=0)
    assert first.describe_lost() == (
        "worker 1 at 127.0.0.1:2 ended with ValueError: no"
    )
    first.stop("ended", patience=0)


def test_stopping_leaves_no_thread_in_native_code():
    """One that comes back when the interpreter has gone would abort it."""
    board = Memory()
    beats = beats_of(0, board)
    before = set(threading.enumerate())
    beats.start()
    board.is_open.clear()
    board.is_read.clear()
    board.is_read.wait()
    ends = threading.Timer(0.3, board.is_open.set)
    ends.start()
    beats.stop("ended", patience=0)
    ends.join()
    assert set(threading.enumerate()) <= before


def test_stopping_does_not_wait_for_ever():
    board = Memory()
    beats = beats_of(0, board)
    beats.start()
    board.is_open.clear()
    board.is_read.clear()
    board.is_read.wait()
    beats.stop("ended", patience=0)
    board.is_open.set()

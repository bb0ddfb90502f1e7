"""A lost worker is named with the reason, and none that lives.

The blackboard is in memory.
"""

import itertools
import threading
import types

import pytest

from keras_dist.core.plan import Cluster
from keras_dist.joining.addresses import listen
from keras_dist.joining.pulse import Pulse
from keras_dist.plugin import heartbeats
from keras_dist.plugin.heartbeats import Blackboard
from keras_dist.plugin.heartbeats import Heartbeats

ADDRESSES = ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")


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


class OneOfTwoLives(Blackboard):
    """A blackboard on which worker 1 has always written, and worker 2 never."""

    def __init__(self):
        self.beats = itertools.count()

    def write(self, key, text):
        pass

    def read(self, keys):
        new = f"\n{next(self.beats)}"
        return [new if key.endswith("beat/1") else "" for key in keys]


def beats_of(index, board, silence=1.0, num_workers=2, **options):
    addresses = ADDRESSES[:num_workers]
    cluster = Cluster(index, leader=addresses[0], addresses=addresses)
    options.setdefault("server", 0)
    return Heartbeats(cluster, board, silence=silence, **options)


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


@pytest.mark.parametrize("answers", [True, False])
def test_stopping_leaves_no_thread_and_does_not_wait_for_ever(answers):
    """One that comes back when the interpreter has gone would abort it."""
    board = Memory()
    beats = beats_of(0, board)
    before = set(threading.enumerate())
    beats.start()
    board.is_open.clear()
    board.is_read.clear()
    board.is_read.wait()
    ends = threading.Timer(0.3, board.is_open.set)
    if answers:
        ends.start()
    beats.stop("ended", patience=0)
    if answers:
        ends.join()
        assert set(threading.enumerate()) <= before
    board.is_open.set()


def test_the_silent_worker_is_named_and_no_other(monkeypatch):
    beats = beats_of(0, OneOfTwoLives(), num_workers=3)
    monkeypatch.setattr(
        beats,
        "_wait_for_rounds",
        lambda count: [beats._look() for _ in range(count)],
    )
    assert beats.describe_lost() == (
        "worker 2 at 127.0.0.1:3 gives no sign of life"
    )


@pytest.mark.parametrize(
    ("seconds", "is_lost"),
    [([2.0] * 7, True), ([2.0, 60.0, 2.0, 2.0], False)],
    ids=["silence", "suspended itself"],
)
def test_a_process_that_was_suspended_blames_nobody(
    seconds, is_lost, monkeypatch
):
    now, rest, lost = [0.0], list(seconds), []

    def wait(_):
        now[0] += rest.pop(0) if rest else 0.0
        return not rest

    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(heartbeats, "time", clock)
    beats = beats_of(
        0, Memory(), silence=10.0, server=None, on_loss=lambda: lost.append(1)
    )
    monkeypatch.setattr(beats, "_over", types.SimpleNamespace(wait=wait))
    beats._watch()
    assert bool(lost) == is_lost


@pytest.mark.parametrize("runs", [True, False])
def test_a_silent_worker_that_runs_is_not_lost(runs):
    """As one whose native code holds Python's lock."""
    board, lost = Memory(), threading.Event()
    first = beats_of(0, board, silence=0.5, on_loss=lost.set)
    with listen("127.0.0.1:0") as listener:
        other = Pulse(listener)
    board.texts["keras_dist/pulse/1"] = other.address
    board.texts["keras_dist/beat/1"] = "\n1 "
    if not runs:
        other.close()
    first.start()
    assert lost.wait(3.0 if runs else 100.0) != runs
    expected = "" if runs else "worker 1 at 127.0.0.1:2 gives no sign of life"
    assert first.describe_lost() == expected
    first.stop("ended", patience=0)
    if runs:
        other.close()


def test_the_wait_for_a_pulse_is_no_suspension(monkeypatch):
    """Else a worker without an answer would never count as lost."""
    beats = beats_of(0, OneOfTwoLives(), num_workers=3)
    clock = iter(float(second) for second in range(0, 1000, 100))
    monkeypatch.setattr(heartbeats.time, "monotonic", lambda: next(clock))
    beats._pulses = {2: ("127.0.0.1", 1)}
    monkeypatch.setattr(
        heartbeats, "has_pulse", lambda *_: bool(heartbeats.time.monotonic())
    )
    beats._woke = beats._granted = 0.0
    assert not beats._runs(2)
    assert beats._woke == 100.0

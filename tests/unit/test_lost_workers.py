"""Who is taken for lost: the one that is silent, and nobody else."""

import types

import pytest

from keras_dist.core.plan import Cluster
from keras_dist.plugin import heartbeats
from keras_dist.plugin.heartbeats import Blackboard
from keras_dist.plugin.heartbeats import Heartbeats

ADDRESSES = ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")


class Memory(Blackboard):
    """A blackboard in memory."""

    def __init__(self):
        self.texts = {}

    def write(self, key, text):
        self.texts[key] = text

    def read(self, keys):
        return [self.texts.get(key, "") for key in keys]


def beats_of(index, board, **options):
    cluster = Cluster(index, leader=ADDRESSES[0], addresses=ADDRESSES)
    return Heartbeats(cluster, board, **options)


def test_only_who_is_silent_is_named():
    board = Memory()
    alive = [beats_of(i, board, keeper=0, silence=2.0) for i in range(2)]
    for each in alive:
        each.start()
    assert alive[0].describe_lost() == (
        "worker 2 at 127.0.0.1:3 gives no sign of life"
    )
    for each in alive:
        each.stop("ended", patience=0)


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
        0,
        Memory(),
        keeper=None,
        silence=10.0,
        on_loss=lambda: lost.append(1),
    )
    monkeypatch.setattr(beats, "_over", types.SimpleNamespace(wait=wait))
    beats._watch()
    assert bool(lost) == is_lost

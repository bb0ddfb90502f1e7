"""A worker hears what the chief says, or why it says nothing."""

import json

import pytest

from keras_dist.core.plan import Cluster
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.errors import WorkerLostError
from keras_dist.plugin import messages

CLUSTER = Cluster(1, "one:1", ("one:1", "two:1"))


class Watch:
    """This worker's watch, and the table: what the chief has said, in turn."""

    def __init__(self, *said, call=""):
        self.board, self.said, self.call = self, list(said), call
        self.written = []

    def write(self, key, text):
        self.written.append((key, text))

    def read(self, keys):
        assert keys == ["keras_dist/said/0"]
        said = self.said.pop(0) if len(self.said) > 1 else self.said[0]
        return [said if isinstance(said, str) else json.dumps(said)]

    def call_ahead(self, index):
        assert index == 0
        return self.call


def messages_of(watch, check=lambda in_background: None):
    return messages.Messages(CLUSTER, watch, check)


def hear(watch, patience=60.0, **kwargs):
    return messages_of(watch, **kwargs).hear("a", "the save", patience)


def test_what_was_said_is_kept_in_short(monkeypatch):
    monkeypatch.setattr(messages, "_KEPT", 2)
    watch = Watch("")
    say = messages_of(watch).say
    for name in "abc":
        say(name, messages.BEGUN)
        say(name, f"+{name} and more")
    say("d", "+4")
    assert {key for key, _ in watch.written} == {"keras_dist/said/1"}
    said = [json.loads(text) for _, text in watch.written]
    assert said[:2] == [{"a": "."}, {"a": "+a and more"}]
    assert said[-1] == {"b": "+", "c": "+", "d": "+4"}


def test_a_chief_that_waits_for_this_worker_says_nothing(monkeypatch):
    monkeypatch.setattr(messages, "_AHEAD", 0.05)
    with pytest.raises(ReplicaDivergenceError, match="the save") as raised:
        hear(Watch("", call="reduce in train.py:7"))
    assert "worker 0 at reduce in train.py:7" in str(raised.value)


def test_a_chief_that_has_begun_may_wait_and_take_its_time(monkeypatch):
    monkeypatch.setattr(messages, "_AHEAD", 0.0)
    watch = Watch(*[{"a": "."}] * 8, {"a": "+"}, call="reduce")
    assert hear(watch, patience=0.0) == "+"


def test_a_chief_that_does_not_come():
    expected = "worker 0 has not come to the save for 0.05 seconds"
    with pytest.raises(WorkerLostError, match=expected):
        hear(Watch(""), patience=0.05)


@pytest.mark.parametrize("said", ["", {"a": "."}, {"a": "+"}])
def test_a_chief_that_is_lost_may_have_said_it(said):
    def check(in_background):
        raise WorkerLostError("worker 0 is lost")

    if "+" in str(said):
        assert hear(Watch(said), check=check) == "+"
        return
    with pytest.raises(WorkerLostError, match="worker 0 is lost"):
        hear(Watch(said), check=check)

"""Meetings of workers by name, with a table that the test writes."""

import pytest

from keras_dist.core.plan import Cluster
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.plugin import meetings

CLUSTER = Cluster(0, "one:1", ("one:1", "two:1"))


class Watch:
    """This worker's watch, and the table: the other worker's texts in turn."""

    def __init__(self, *texts, wait="3.5"):
        self.board, self.texts, self.wait = self, list(texts), wait
        self.written, self.is_in = [], False

    def write(self, key, text):
        self.written.append((key, text))

    def read(self, keys):
        assert keys == ["keras_dist/meetings/1"] and self.is_in
        return [self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]]

    def enter(self):
        self.is_in = True

    def exit(self):
        self.is_in = False

    def wait_of(self, index):
        return self.wait


def meet_by(watch):
    return meetings.Meetings(CLUSTER, watch, lambda in_background: None)


def test_it_waits_for_the_other_worker():
    watch = Watch("", "1 a\n", "1 a\n", "2 b\n1 a")
    both = meet_by(watch)
    both.meet("a")
    both.meet("b")
    own = "keras_dist/meetings/0"
    assert watch.written == [(own, "1 a\n"), (own, "2 b\n1 a")]
    assert len(watch.texts) == 1 and not watch.is_in


def test_the_other_worker_may_be_at_the_next_one_already():
    meet_by(Watch("2 b\n1 a")).meet("a")


@pytest.mark.parametrize("text", ["1 b\n", "2 c\n1 b", "2 a\n1 b"])
def test_another_name_is_an_error(text):
    """Also after the other worker has left it with an error, and met again."""
    watch = Watch("", text)
    with pytest.raises(ReplicaDivergenceError, match="at 'a', and worker 1 is"):
        meet_by(watch).meet("a")
    assert not watch.is_in


def test_a_worker_that_is_in_one_wait_does_not_come(monkeypatch):
    monkeypatch.setattr(meetings, "_LATE", 0.05)
    with pytest.raises(ReplicaDivergenceError, match="waits for something"):
        meet_by(Watch("")).meet("a")


@pytest.mark.parametrize("waits", [[""], ["1.0", "2.0"]])
def test_a_worker_that_does_something_may_be_late(monkeypatch, waits):
    """It waits for nobody, or each time for something else."""
    monkeypatch.setattr(meetings, "_LATE", 0.0)
    watch = Watch(*[""] * 6, "1 a\n")
    monkeypatch.setattr(
        watch, "wait_of", lambda index: waits[len(watch.texts) % len(waits)]
    )
    meet_by(watch).meet("a")

"""Calls of workers are told apart by what counts only."""

from keras_dist.plugin import recorder
from keras_dist.plugin.recorder import Call
from keras_dist.plugin.recorder import FlightRecorder

A, B, END = (Call(name, name) for name in ("a", "b", "the end"))


def recorders(*calls):
    """One for each list of calls."""
    made = [FlightRecorder() for _ in calls]
    for each, own in zip(made, calls, strict=True):
        for call in own:
            each.note(call)
    return made


def test_calls_before_an_error_of_all_do_not_count():
    first, second = recorders([A], [B])
    for each in (first, second):
        each.begin_again()
        each.note(A)
    assert first.apart_from(second.line()) is None


def test_a_call_that_may_come_to_nothing_counts_later(monkeypatch):
    first, second = recorders([A], [A, END])
    entry = first.note(B, is_sure=False)
    assert first.apart_from(second.line()) is None
    assert second.apart_from(first.line()) is None
    monkeypatch.setattr(recorder, "_UNSURE", 0.0)
    assert first.apart_from(second.line()) == ("b", "the end")
    assert second.apart_from(first.line()) == ("the end", "b")
    first.take_back(entry)
    assert first.apart_from(second.line()) is None

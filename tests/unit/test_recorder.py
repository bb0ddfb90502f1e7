"""The calls of a worker, and the places they are told apart by."""

import pytest

from keras_dist.plugin import recorder
from keras_dist.plugin.recorder import Call
from keras_dist.plugin.recorder import FlightRecorder
from keras_dist.plugin.recorder import of_its_own
from keras_dist.plugin.recorder import where

A, B, END = (Call(name, name) for name in ("a", "b", "the end"))


def recorders(*calls):
    """One for each list of calls."""
    made = [FlightRecorder() for _ in calls]
    for each, own in zip(made, calls, strict=True):
        for call in own:
            each.note(call)
    return made


@pytest.mark.parametrize(
    ("own", "theirs", "told"),
    [
        ([A, B], [A, B], None),
        ([A], [A, B], None),
        ([A, B], [A, A], ("b", "a")),
        ([A, A], [B, A], ("a", "a")),
    ],
)
def test_other_calls_are_told(own, theirs, told):
    first, second = recorders(own, theirs)
    assert first.apart_from(second.told()) == told


def test_calls_before_an_error_of_all_do_not_count():
    first, second = recorders([A], [B])
    for each in (first, second):
        each.begin_again()
        each.note(A)
    assert first.apart_from(second.told()) is None


def test_a_call_that_may_come_to_nothing_counts_later(monkeypatch):
    first, second = recorders([A], [A, END])
    entry = first.note(B, is_sure=False)
    assert first.apart_from(second.told()) is None
    assert second.apart_from(first.told()) is None
    monkeypatch.setattr(recorder, "_UNSURE", 0.0)
    assert first.apart_from(second.told()) == ("b", "the end")
    assert second.apart_from(first.told()) == ("the end", "b")
    first.take_back(entry)
    assert first.apart_from(second.told()) is None


def test_saves_are_counted_in_each_place():
    chief, other = recorders([A], [A])
    chief.count("alone")
    for _ in range(2):
        assert chief.count("together") == other.count("together")


def test_a_place_is_the_users_line():
    first = where()
    second = where()
    assert first[0] == first[1] != second[0]
    assert first[1].startswith("test_recorder.py:")


def test_the_line_of_a_call_of_our_own_is_only_told():
    module = {"__name__": "keras_dist.made_up", "where": where}
    exec("def fit(): return where()", module)
    fit = of_its_own("`fit`")(module["fit"])
    first = fit()
    second = fit()
    assert first[0] == second[0] == "`fit`"
    assert first[1] != second[1]
    del recorder._OWN[fit.__code__]

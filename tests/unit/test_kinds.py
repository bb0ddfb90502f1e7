"""What is known of an object is not taken for another's of the same id."""

from keras_dist.replica import kinds


class _Thing:
    pass


def test_an_id_that_is_used_again(monkeypatch):
    # Python gives a freed id to a new object when it likes.
    monkeypatch.setattr(kinds, "id", lambda _: 7, raising=False)
    known = kinds.Known()
    first = _Thing()
    known.set(first, "kind")
    assert known.get(first) == "kind"
    del first
    assert known.get(_Thing()) is None

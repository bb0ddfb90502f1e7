"""What is known of an object is not taken for another's of the same id."""

from keras_dist.replica.kinds import Known


class _Thing:
    pass


def test_an_id_that_is_used_again():
    known = Known()
    first = _Thing()
    known.set(first, "kind")
    assert known.get(first) == "kind"
    place = id(first)
    del first
    others = []
    while not others or id(others[-1]) != place:
        assert len(others) < 1000, "no object got the id again"
        others.append(_Thing())
    assert known.get(others[-1]) is None

"""Values of one kind are packed together, up to a limit, and unpacked."""

import pytest

from keras_dist.core.packing import packs
from keras_dist.core.packing import places


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (8, [[0, 1], [2], [3, 4]]),
        (7, [[0], [1], [2], [3, 4]]),
        (100, [[0, 1, 3, 4], [2]]),
    ],
)
def test_packs_are_of_one_kind_and_within_the_limit(limit, expected):
    found = packs(list("aabaa"), [4, 4, 99, 4, 3], limit)
    assert found == expected


def test_where_values_lie():
    together = list("abcde")
    assert [together[place] for place in places([2, 0, 3])] == [
        ["a", "b"],
        [],
        ["c", "d", "e"],
    ]

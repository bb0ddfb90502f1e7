"""How values are packed: what goes together, and where it begins."""

import pytest

from keras_dist.core.packing import in_packs
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


def test_the_last_come_first():
    assert packs(list("aba"), [1, 1, 1], 1, last_first=True) == [[2], [1], [0]]
    assert packs(list("aba"), last_first=True) == [[2, 0], [1]]


def test_a_value_above_the_limit_is_alone():
    assert packs(list("aaa"), [1, 9, 1], 4) == [[0], [1], [2]]


def test_results_come_in_the_order_of_values():
    found = in_packs(lambda pack: [x * 10 for x in pack], [[2, 0]], [1, 2, 3])
    assert found == [10, 2, 30]


def test_where_values_lie():
    together = list("abcde")
    assert [together[place] for place in places([2, 0, 3])] == [
        ["a", "b"],
        [],
        ["c", "d", "e"],
    ]

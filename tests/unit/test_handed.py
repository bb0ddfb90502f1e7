"""Which arrays that a step hands over have rows."""

import pytest

from keras_dist.core.rows import RowShard
from keras_dist.replica.handed import Handed

# Sizes of a table of 8, of rows, of two values for each row, and of a number.
NUMBER = -1


def _everyone(*rows):
    total = sum(rows)
    return [([8, n, 2 * n, NUMBER], RowShard(n, total)) for n in rows]


def test_uneven_shares_tell_and_are_remembered():
    handed = Handed()
    expected = [False, True, True, False]
    assert handed.have_rows("loss", _everyone(5, 3), None) == expected
    assert not handed.is_unsure
    # Here, 8 is a multiple of each replica's rows.
    assert handed.have_rows("loss", _everyone(4, 4), None) == expected
    assert not handed.is_unsure


def test_even_shares_ask_for_uneven_ones_once():
    handed = Handed()
    found = handed.have_rows("loss", _everyone(4, 4), None)
    assert found == [True, True, True, False]
    assert handed.is_unsure
    handed.is_unsure = False
    handed.have_rows("loss", _everyone(4, 4), None)
    assert not handed.is_unsure
    handed.have_rows("metric", _everyone(4, 4), None)
    assert handed.is_unsure


def test_of_one_row_each_one_value_has_rows():
    found = Handed().have_rows("loss", _everyone(1, 1), None)
    assert found == [False, True, False, False]


def test_a_replica_without_rows_does_not_count():
    everyone = [*_everyone(5, 3), ([8, 1, 2, NUMBER], RowShard(0, 8))]
    found = Handed().have_rows("loss", everyone, None)
    assert found == [False, True, True, False]


@pytest.mark.parametrize("rows", [(4, 4), (5, 3)])
def test_without_code_of_the_users_all_arrays_have(rows):
    found = Handed(rows_only=True).have_rows("loss", _everyone(*rows), None)
    assert found == [True, True, True, False]


class Other:
    """Another worker, with three rows where this one has five."""

    def concatenate_numbers(self, numbers, what):
        return [*numbers, 3, 8, 3, 6, NUMBER]


def test_workers_compare_their_sizes():
    found = Handed().have_rows("loss", _everyone(5), Other())
    assert found == [False, True, True, False]

"""A random draw has rows on an axis that replicas find out together."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_dist.core.rows import RowShard
from keras_dist.plugin.draws import DrawnRows
from keras_dist.plugin.draws import drawn_by
from keras_dist.plugin.draws import rows_by_size
from keras_dist.plugin.front_end import HOOKS
from keras_dist.plugin.places import APART
from keras_dist.plugin.places import Places
from keras_dist.verification.draws import drawer_of
from parity import draws

# The second of three shares of 12 rows.
SHARE = RowShard(4, 12, 4)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4, 7), DrawnRows(0, 4, 4, 12)),
        ((4,), DrawnRows(0, 4, 4, 12)),
        ((20,), DrawnRows(0, 20, 20, 60)),  # five values for each row
        ((7, 4), DrawnRows(1, 4, 4, 12)),
        ((8, 4), DrawnRows(0, 8, 8, 24)),  # in doubt, the first axis
        ((1, 7), None),
        ((), None),
    ],
)
def test_sizes_tell_the_axis_of_rows(shape, expected):
    assert rows_by_size(shape, SHARE) == expected


def _drawn(*each):
    """What replicas with these rows draw: by place, a shape and an axis."""
    return [
        {place: (rows, [shape], axis) for place, (shape, axis) in own.items()}
        for rows, own in each
    ]


def test_places_learn_from_shares_that_differ():
    places = Places(draws=True, is_open=True)
    places.begin([4, 4, 4])
    assert places.is_open and not places.is_looking
    places.begin([5, 3, 4])
    assert places.is_looking
    share = RowShard(5, 12, 0)
    # By sizes, the first replica can't tell better.
    assert places.axis(0, "table", [10, 7], share) == 0
    assert places.axis(0, "columns", [8, 5], share) == 1
    own = {"table": ([10, 7], 0), "columns": ([8, 5], 1)}
    other = {"table": ([10, 7], 0), "columns": ([8, 3], 1)}
    assert places.take_new() == _drawn((5, own))
    assert not places.has_new
    assert places.compare(_drawn((5, own), (3, other)))
    # The step begins anew, and knows better.
    places.begin([5, 3, 4])
    assert places.axis(0, "table", [10, 7], share) is None
    assert places.axis(0, "columns", [8, 5], share) == 1
    known = {"table": ([10, 7], None)}
    assert not places.compare(_drawn((5, own | known), (3, other | known)))
    places.end()
    assert not places.is_open
    places.begin([4, 4, 4])
    assert places.axis(0, "columns", [8, 4], SHARE) == 1
    # Of another shape than before: it may have rows after all.
    assert places.axis(0, "table", [4, 7], SHARE) == 0
    places.end()


def test_a_new_place_goes_by_sizes_and_asks_for_a_look():
    places = Places(draws=True, is_open=True)
    places.is_open = False
    places.begin([4, 4, 4])
    assert places.axis(0, "new", [8, 7], SHARE) == 0
    places.end()
    assert places.is_open
    places.begin([5, 3, 4])
    share = RowShard(5, 12, 0)
    assert places.axis(0, "new", [8, 7], share) is None
    each = {"new": ([8, 7], None)}
    with pytest.warns(UserWarning, match="new: a random draw was taken"):
        assert not places.compare(_drawn((5, each), (3, each)))
    places.end()
    assert not places.is_open


def test_a_shape_without_rows_that_changes_is_looked_at_again():
    """As that of noise which rows share, for sequences of some lengths."""
    places = Places(draws=True, is_open=True)

    def look(length):
        places.begin([5, 3])
        places.axis(0, "noise", [1, length, 6], RowShard(5, 8, 0))
        each = {"noise": ([1, length, 6], None)}
        assert not places.compare(_drawn((5, each), (3, each)))
        places.end()
        assert not places.is_open

    def draw(length):
        places.begin([4, 4])
        assert (
            places.axis(0, "noise", [1, length, 6], RowShard(4, 8, 4)) is None
        )
        places.end()

    look(7)
    draw(7)
    assert not places.is_open
    draw(9)
    assert places.is_open
    look(9)
    draw(11)  # such sizes differ, and there are no rows
    assert not places.is_open


@pytest.mark.parametrize(
    "others", [(3, [[5, 7], [2, 7]], 0), (3, [[4, 7]], 0), (3, [[7, 3]], 0)]
)
def test_draws_that_follow_from_values_are_apart(others):
    places = Places(draws=True, is_open=True)
    places.begin([5, 3])
    share = RowShard(5, 8, 0)
    assert places.axis(0, "layer 'mine'|1", [5, 7], share) == 0
    drawn = [{"layer 'mine'|1": (5, [[5, 7]], 0)}, {"layer 'mine'|1": others}]
    with pytest.warns(UserWarning, match="layer 'mine': replicas draw unequal"):
        assert places.compare(drawn)
    places.begin([5, 3])
    assert places.axis(0, "layer 'mine'|1", [5, 7], share) == APART


# Those of which each row draws its own, whatever the number of rows.
OF_ROWS = sorted(
    {*draws.DRAWS}
    - {"one_row", "number", "of_weights", "of_six", "long_columns", "double"}
    - {"without_a_seed", "dropped_columns", "columns_in_another_order"}
)
X = np.random.default_rng(0).uniform(0.2, 0.8, (6, 7)).astype("float32")


@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.parametrize("index", [[5, 4, 3, 2, 1, 0], [*range(6), *range(6)]])
def test_rows_in_another_order_draw_what_they_drew(name, index):
    """As those that `strategy.verify` gives to a model."""
    index = np.asarray(index)

    def drawn(x):
        value = draws.DRAWS[name](keras.random, ops.convert_to_tensor(x), 1)
        return ops.convert_to_numpy(value)

    whole = drawn(X)
    with HOOKS, drawn_by(drawer_of(index)):
        found = drawn(X[index])
    np.testing.assert_allclose(found, whole[index], rtol=1e-6)

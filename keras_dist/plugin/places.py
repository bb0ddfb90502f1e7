"""The axes of rows in a step's random draws, by the place of each draw.

Sizes alone can't tell, where replicas have equally many rows. So a step is
split unevenly, and the axis whose size differs has the rows. Replicas run one
after another there: the first goes by sizes, and where they first meet, all
have drawn. If sizes were wrong, the step begins anew.
"""

import itertools
import warnings
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

from keras_dist.core.rows import RowShard
from keras_dist.plugin.draws import rows_by_size

# In place of an axis: replicas draw unequally much, or it is not known.
APART, UNKNOWN = -1, -2

# What one replica draws: by place, its number of rows, the shapes, and the axis
# that it takes for that of rows.
Drawn = dict[str, tuple[int, list[Any], int | None]]


class MisjudgedDraws(BaseException):
    """Ends a step that drew for the wrong axes, and is to begin anew."""


class Places:
    """The facts that are known of the draws of one of a model's steps.

    Args:
        draws: Boolean, whether the model has generators of draws.
        is_open: Boolean, whether the first step is to be split unevenly.
        recover: Callable that makes the model ready for a step again.
    """

    def __init__(
        self,
        draws: bool,
        is_open: bool,
        recover: Callable[[], None] = lambda: None,
    ) -> None:
        self.draws = draws
        self.is_open = is_open
        self.recover = recover
        # Whether replicas compare what they draw, in the step that runs.
        self.is_looking = False
        self._axes: dict[str, int | None] = {}
        # By place without rows, the shapes that were seen there.
        self._shapes: dict[str, set[tuple[int, ...]]] = {}
        # By place, a number of rows, and the shape that was drawn for them.
        self._seen: dict[str, tuple[int, Any]] = {}
        # By place, the axis that sizes told in steps without a look.
        self._guesses: dict[str, int | None] = {}
        self._reported: set[str] = set()
        self.begin([])

    def shift(self, edges: list[int]) -> bool:
        """Makes equal shares differ by moving a row, in an open step.

        Args:
            edges: List with the first row of each share, and the end.

        Returns:
            Boolean, whether they have changed.
        """
        sizes = {stop - start for start, stop in itertools.pairwise(edges)}
        if not self.is_open or len(edges) < 3:
            return False
        if max(sizes) > 1:
            if len(sizes) > 1:
                return False
            edges[1] += 1
            return True
        if not self.draws:
            return False
        # One replica gets all of the few rows.
        edges[1:] = [edges[-1]] * (len(edges) - 1)
        return edges[-1] > 1

    def begin(self, lengths: Sequence[int]) -> None:
        """Begins a step in which replicas have these numbers of rows."""
        self.is_looking = self.is_open and len(set(lengths)) > 1
        # By a replica's position here.
        self._drawn: dict[int, Drawn] = {}
        # By place, the axis that the first replica took.
        self._taken: dict[str, int | None] = {}
        # By place, how many values the first replica draws for each row.
        self._times: dict[str, int] = {}
        # Places that went by sizes.
        self._guessed: set[str] = set()
        self.has_new = False

    def end(self) -> None:
        """Ends a step that did not fail."""
        if self.is_looking:
            self.is_open = False
            # Another look at what replicas drew alike would show no more.
            for place in self._guessed:
                self._axes.setdefault(place, UNKNOWN)
            return
        for place in self._guessed:
            self._guesses[place] = self._taken[place]
            if self._axes.get(place) != UNKNOWN:
                self.is_open = True

    def axis(
        self, position: int, place: str, shape: list[int], share: RowShard
    ) -> int | None:
        """Notes what a replica draws, and returns the axis of its rows.

        Returns:
            An integer, `APART`, or `None` if what is drawn has no rows.
        """
        rows = max(share.rows, 1)
        axis = self._taken.get(place, UNKNOWN)
        if axis == UNKNOWN:
            axis = self._axis(place, shape, rows)
            if axis == UNKNOWN:
                drawn = rows_by_size(shape, share)
                axis = None if drawn is None else drawn.axis
                self._guessed.add(place)
            self._taken[place] = axis
        if self.is_looking:
            by_place = self._drawn.setdefault(position, {})
            by_place.setdefault(place, (rows, [], axis))[1].append(shape)
            self.has_new = True
        if axis is None or axis < 0:
            return axis
        if axis >= len(shape) or shape[axis] % rows:
            return APART
        # Else the first replica was wrong, which the next rendezvous will find.
        times = shape[axis] // rows
        return axis if self._times.setdefault(place, times) == times else APART

    def _axis(self, place: str, shape: list[int], rows: int) -> int | None:
        axis: int | None = self._axes.get(place, UNKNOWN)
        if axis == UNKNOWN and place in self._seen:
            seen_rows, seen_shape = self._seen[place]
            if seen_rows != rows:
                axis = _axis_of(rows, [shape], seen_rows, [seen_shape])
                self._learn(place, axis, shape)
        if axis is None:
            seen = self._shapes[place]
            # Its sizes may be those of sequences, and differ.
            return None if tuple(shape) in seen or len(seen) > 1 else UNKNOWN
        if axis >= 0 and (axis >= len(shape) or shape[axis] % rows):
            return UNKNOWN
        return axis

    def _learn(self, place: str, axis: int | None, shape: Any) -> None:
        self._axes[place] = axis
        if self._guesses.pop(place, axis) != axis:
            self.tell(place, GUESSED)
        if axis is None:
            self._shapes.setdefault(place, set()).add(tuple(shape))
        if axis == APART:
            self.tell(place, _APART)

    def take_new(self) -> list[Drawn]:
        """Returns what replicas here drew, which is not new from then on."""
        self.has_new = False
        return [self._drawn.get(i, {}) for i in range(max(self._drawn) + 1)]

    def compare(self, everyone: Sequence[Drawn]) -> bool:
        """Learns from what all replicas drew; returns whether one was wrong."""
        was_wrong = False
        for place in {place for drawn in everyone for place in drawn}:
            entries = [drawn[place] for drawn in everyone if place in drawn]
            rows, shapes, _ = entries[0]
            self._seen[place] = rows, shapes[0]
            others = [entry for entry in entries if entry[0] != rows]
            if not others:
                continue
            axis = _axis_of(rows, shapes, *others[0][:2])
            self._learn(place, axis, shapes[0])
            was_wrong = was_wrong or any(entry[2] != axis for entry in entries)
        return was_wrong

    def tell(self, place: str, text: str) -> None:
        """Warns of a place, once."""
        if (place + text) not in self._reported:
            self._reported.add(place + text)
            warnings.warn(text.format(place.split("|")[0]), stacklevel=2)


def _axis_of(
    rows: int, shapes: list[Any], others_rows: int, others: list[Any]
) -> int | None:
    """Returns the axis of rows, given what two replicas drew at a place."""
    if len(shapes) != len(others):
        return APART  # in a loop over rows, for instance
    shape, other = shapes[0], others[0]
    pairs = enumerate(zip(shape, other, strict=True))
    axes = [axis for axis, (one, another) in pairs if one != another]
    if not axes:
        return None
    axis = axes[0]
    is_even = shape[axis] * others_rows == other[axis] * rows
    return axis if is_even and len(axes) == 1 else APART


_APART = (
    "{}: replicas draw unequally many random numbers for equally many rows, or "
    "in a loop over rows. So these draws differ from those of one device. "
    "Expected: draws of `keras.random` whose sizes follow from the number of "
    "rows, made once for all rows of a batch."
)
GUESSED = (
    "{}: a random draw was taken for one with a number for each row, or for "
    "one without, and is not. In this step, or in one before, it was not that "
    "of one device. From now on it is."
)
DIVERGED = (
    "{}: replicas made different random draws, so these differ from those of "
    "one device. Expected: the same draws on each replica, as one device makes "
    "them for all rows. Look for a branch or a rate that depends on the values "
    "of rows, or on Python's or NumPy's random numbers."
)

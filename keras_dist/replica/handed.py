"""Tells which values that a step hands to losses and metrics have rows.

Sizes alone can't tell where replicas have equally many rows. So a step is split
unevenly at first, and values with rows differ in size as the rows do.
"""

from collections.abc import Sequence
from typing import Any

from keras_dist.core.rows import RowShard
from keras_dist.plugin.workers import Workers
from keras_dist.replica.exchange import is_row_shaped

# In place of a size: without an axis, and known when a graph runs.
_NUMBER, _ANY = -1, -2


def sizes_of(leaves: Sequence[Any]) -> list[int]:
    """Returns the size of each leaf along its first axis."""
    return [
        (_ANY if leaf.shape[0] is None else leaf.shape[0])
        if is_row_shaped(leaf)
        else _NUMBER
        for leaf in leaves
    ]


class Handed:
    """The facts that are known of what one of a model's steps hands over.

    Args:
        rows_only: Boolean, whether all arrays have rows.
    """

    def __init__(self, rows_only: bool = False) -> None:
        self._rows_only = rows_only
        self._known: dict[str, list[bool]] = {}
        # Places that can be told when a step is split unevenly.
        self._asked: set[str] = set()
        self.is_unsure = False

    def have_rows(
        self,
        place: str,
        everyone: Sequence[tuple[list[int], RowShard]],
        workers: Workers | None,
    ) -> list[bool]:
        """Returns whether each leaf has rows, at a rendezvous of all replicas.

        Args:
            place: String, what the leaves are handed to.
            everyone: Sequence with `sizes_of` the leaves and the share of each
                replica here.
            workers: `Workers`, if there are several.
        """
        sizes, share = everyone[0]
        place = f"{place} of {len(sizes)}"
        if self._rows_only:
            return [size != _NUMBER for size in sizes]
        known = self._known.get(place)
        if known is not None:
            return known
        if not isinstance(share.rows, int):
            return [size == _ANY for size in sizes]
        numbers = [
            [share.rows, *replica_sizes] for replica_sizes, share in everyone
        ]
        if workers is not None:
            flat = workers.concatenate_numbers(
                [number for entry in numbers for number in entry],
                "the sizes of values",
            )
            step = 1 + len(sizes)
            numbers = [flat[i : i + step] for i in range(0, len(flat), step)]
        numbers = [entry for entry in numbers if entry[0]]  # those with rows
        rows, *columns = map(list, zip(*numbers, strict=True))
        flags = [_are_multiples(column, rows) for column in columns]
        if len(set(rows)) > 1 or not any(flags):
            self._known[place] = flags
        elif place not in self._asked:
            self._asked.add(place)
            self.is_unsure = True
        return flags


def _are_multiples(sizes: Sequence[int], rows: Sequence[int]) -> bool:
    """Returns whether there are equally many values for each row."""
    if _ANY in sizes:
        return True
    if _NUMBER in sizes:
        return False
    if set(rows) == {1}:
        return set(sizes) == {1}
    return all(
        size * rows[0] == sizes[0] * num_rows and size % num_rows == 0
        for size, num_rows in zip(sizes, rows, strict=True)
    )

"""Warns of batches whose arrays have different numbers of rows.

Such batches are not split.
"""

import warnings
from collections.abc import Iterable


def text_of_unequal(lengths: Iterable[int], on_each: bool) -> str:
    """Returns the text of the warning: what happens to the batch, what to do.

    `lengths` are the numbers of rows of its arrays. With `on_each`, each
    replica computes all of the batch, else the first one does.
    """
    numbers = ", ".join(str(n) for n in dict.fromkeys(map(int, lengths)))
    who = (
        "Each replica computes all of it"
        if on_each
        else "Replica 0 computes all of it, and the others nothing"
    )
    return (
        f"The arrays of a batch have different numbers of rows ({numbers}), "
        "so nobody knows which axis is the batch's: it is not cut. "
        f"{who}. The numbers are those of one device, but nothing is shared. "
        "Expected: one number of rows in all arrays. Repeat what has no rows "
        "for each of them, or keep it in the model."
    )


class UnequalLengths:
    """A warning about batches with unequal arrays that is shown once."""

    def __init__(self) -> None:
        self._is_told = False

    def tell(self, lengths: Iterable[int], on_each: bool) -> None:
        """Warns with `text_of_unequal`, the first time."""
        if not self._is_told:
            self._is_told = True
            warnings.warn(text_of_unequal(lengths, on_each), stacklevel=2)

"""Batches whose arrays have different numbers of rows: they are not cut."""

import warnings
from collections.abc import Iterable


def text_of_unequal(lengths: Iterable[int], on_each: bool) -> str:
    """Says what becomes of such a batch, and what to do.

    Args:
        lengths: Iterable of the numbers of rows of its arrays.
        on_each: Boolean, whether each replica computes all of it. Else the
            first one does.
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
    """Warns of such batches, once."""

    def __init__(self) -> None:
        self._is_told = False

    def tell(self, lengths: Iterable[int], on_each: bool) -> None:
        """Warns, or does nothing.

        Args:
            lengths: As for `text_of_unequal`.
            on_each: As for `text_of_unequal`.
        """
        if not self._is_told:
            self._is_told = True
            warnings.warn(text_of_unequal(lengths, on_each), stacklevel=2)

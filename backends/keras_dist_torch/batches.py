"""Splits of a global batch into the rows of each replica."""

from typing import Any
from typing import TypeVar

import torch

from keras_dist.core import nests
from keras_dist.replica.exchange import is_row_shaped

T = TypeVar("T")


def count_rows(batch: Any) -> tuple[int, bool]:
    """Counts a batch's rows; also returns whether all arrays have as many.

    Raises:
        ValueError: If no array has rows.
    """
    rows = lengths_of(batch)
    if not rows:
        raise ValueError(
            "A batch must hold at least one array with rows along axis 0. "
            f"Received: {batch!r}."
        )
    return rows[0], len(set(rows)) == 1


def lengths_of(batch: Any) -> list[int]:
    """Returns the numbers of rows of a batch's arrays."""
    return [
        int(leaf.shape[0])
        for leaf in nests.flatten(batch)
        if is_row_shaped(leaf)
    ]


def cut(batch: Any, rows: slice, device: torch.device) -> Any:
    """Takes some rows of a batch and moves them to a device."""

    def part(leaf: Any) -> Any:
        own = leaf[rows] if is_row_shaped(leaf) else leaf
        if not isinstance(own, torch.Tensor):
            return own
        # `data`, because slices of one tensor share a version counter: autograd
        # would take an in-place change of one, as Keras makes to weights, for
        # a change of the others.
        return own.data.to(device)

    return nests.map_leaves(part, batch)


def move(value: T, device: torch.device) -> T:
    """Moves all tensors of a nested value to a device."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.device != device:
            return leaf.to(device)
        return leaf

    result: T = nests.map_leaves(moved, value)
    return result

"""Cutting a global batch into rows for replicas."""

from typing import Any
from typing import TypeVar

import torch

from keras_dist.core import nests
from keras_dist.replica.join import is_row_shaped

T = TypeVar("T")


def count_rows(batch: Any) -> tuple[int, bool]:
    """Rows of a batch, and whether all its arrays have as many.

    Raises:
        ValueError: If it holds no array with rows.
    """
    rows = lengths_of(batch)
    if not rows:
        raise ValueError(
            "A batch must hold at least one array with rows along axis 0. "
            f"Received: {batch!r}."
        )
    return rows[0], len(set(rows)) == 1


def lengths_of(batch: Any) -> list[int]:
    """The numbers of rows of a batch's arrays."""
    return [
        int(leaf.shape[0])
        for leaf in nests.flatten(batch)
        if is_row_shaped(leaf)
    ]


def cut(batch: Any, rows: slice, device: torch.device) -> Any:
    """Some rows of a batch, on a device."""

    def part(leaf: Any) -> Any:
        own = leaf[rows] if is_row_shaped(leaf) else leaf
        if not isinstance(own, torch.Tensor):
            return own
        # `data`, because slices of one tensor count in-place changes (Keras
        # makes some to weights) together: autograd would blame the others.
        return own.data.to(device)

    return nests.map_leaves(part, batch)


def move(value: T, device: torch.device) -> T:
    """Puts every tensor of a nested value on a device; others stay."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.device != device:
            return leaf.to(device)
        return leaf

    result: T = nests.map_leaves(moved, value)
    return result

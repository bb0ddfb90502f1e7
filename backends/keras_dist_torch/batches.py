"""Cutting a global batch into rows for replicas."""

from typing import Any
from typing import TypeVar

import torch

from keras_dist.training import nests
from keras_dist.training.join import is_row_shaped

T = TypeVar("T")


def count_rows(batch: Any) -> int:
    """Rows of a batch: the length of its first array.

    Raises:
        ValueError: If it holds no array with rows.
    """
    for leaf in nests.flatten(batch):
        if is_row_shaped(leaf):
            return int(leaf.shape[0])
    raise ValueError(
        "A batch must hold at least one array with rows along axis 0. "
        f"Received: {batch!r}."
    )


def cut(
    batch: Any, rows: int, start: int, stop: int, device: torch.device
) -> Any:
    """The rows from `start` to `stop` of a batch, on a device.

    Leaves that do not have `rows` rows are given whole.
    """

    def part(leaf: Any) -> Any:
        has_rows = is_row_shaped(leaf) and leaf.shape[0] == rows
        own = leaf[start:stop] if has_rows else leaf
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

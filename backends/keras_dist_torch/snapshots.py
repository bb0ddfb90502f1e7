"""Snapshots: tensors that stay as they are when variables are assigned to."""

from typing import Any

import keras
import torch


def snapshot(value: Any) -> Any:
    """A tensor with memory of its own; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    # What was computed for gradients has memory of its own. Anything else may
    # be what a variable keeps, or a part of it: `detach` hides that.
    if value.grad_fn is not None and value._base is None:
        return value
    return value.clone()


def value_now(leaf: Any) -> Any:
    """What a compiled function returns for a leaf: of a variable, its value."""
    return snapshot(leaf.value if isinstance(leaf, keras.Variable) else leaf)

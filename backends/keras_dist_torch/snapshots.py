"""Snapshots: tensors that don't change when variables are assigned."""

from typing import Any

import keras
import torch


def snapshot(value: Any) -> Any:
    """Copies a tensor that may share memory with a variable.

    Anything else is returned as it is.
    """
    if not isinstance(value, torch.Tensor):
        return value
    # A result with a graph of autograd that is no view has its own memory. Any
    # other tensor may be a variable's, or a part of it: `detach` hides that.
    if value.grad_fn is not None and value._base is None:
        return value
    return value.clone()


def value_now(leaf: Any) -> Any:
    """Converts a result of a compiled function; variables become tensors."""
    return snapshot(leaf.value if isinstance(leaf, keras.Variable) else leaf)

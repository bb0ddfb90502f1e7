"""Leaves of a batch, as arrays that can be split by rows."""

from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np


def named_leaves(nest: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a nest with their paths, such as `[0]['x']`."""
    if isinstance(nest, Mapping):
        for key in nest:
            yield from named_leaves(nest[key], f"{path}[{key!r}]")
    elif isinstance(nest, (list, tuple)):
        for index, item in enumerate(nest):
            yield from named_leaves(item, f"{path}[{index}]")
    else:
        yield path, nest


def readable(leaf: Any) -> Any:
    """Converts a leaf to a NumPy array or a tensor of the framework in use.

    Another framework's tensors and Python's scalars become NumPy arrays.
    `None` and other objects stay as they are.
    """
    if isinstance(leaf, np.ndarray) or leaf is None:
        return leaf
    if keras.ops.is_tensor(leaf):
        return leaf
    if isinstance(leaf, keras.Variable):
        return leaf.value
    if isinstance(leaf, (bool, int, float)):
        return np.asarray(leaf, keras.backend.standardize_dtype(type(leaf)))
    if hasattr(leaf, "detach"):  # PyTorch's, under another backend
        leaf = leaf.detach().cpu()
    if hasattr(leaf, "__array__") or isinstance(leaf, (str, bytes)):
        return np.asarray(leaf)
    return leaf


def sliceable(leaf: Any) -> Any:
    """Returns a NumPy view of a tensor in host memory, else the tensor.

    A view can be sliced without a copy, and without compiling an operation.
    """
    if isinstance(leaf, np.ndarray):
        return leaf
    try:
        return np.asarray(memoryview(leaf))
    except (TypeError, ValueError, BufferError):
        return leaf  # on another device, or of a dtype without a view


def shape_of(leaf: Any) -> tuple[int | None, ...]:
    """Returns the shape of an array or tensor, `()` for anything else."""
    return tuple(getattr(leaf, "shape", ()))


def check_batched(nest: Any) -> None:
    """Raises `ValueError` if all leaves of an element or spec are scalars."""
    leaves = [(p, x) for p, x in named_leaves(nest) if x is not None]
    if all(not shape_of(leaf) for _, leaf in leaves):
        described = ", ".join(describe(*leaf) for leaf in leaves) or repr(nest)
        raise ValueError(
            "The dataset is not batched, so its elements can't be split over "
            f"replicas; batch first. Received: an element of {described}. "
            "Expected: elements that are batches of the global batch size, "
            "such as of `dataset.batch(global_batch_size)`."
        )


def check_rows(nest: Any) -> Any:
    """Returns the number of rows of a batch, in a graph a tensor.

    Leaves may be `None`. Raises `ValueError` if there are no rows, or if the
    other leaves differ in their numbers of rows.
    """
    check_batched(nest)
    leaves = [(p, x) for p, x in named_leaves(nest) if x is not None]
    first = next(leaf for leaf in leaves if shape_of(leaf[1]))
    rows = shape_of(first[1])[0]
    for path, leaf in leaves:
        if not shape_of(leaf) or shape_of(leaf)[0] not in (rows, None):
            raise ValueError(
                "A batch's arrays must have one number of rows. Received: "
                f"{describe(path, leaf)}, but {describe(*first)}. Expected: "
                f"{rows} rows along axis 0 in each, or None."
            )
    return keras.ops.shape(first[1])[0] if rows is None else int(rows)


def describe(path: str, leaf: Any) -> str:
    """Describes a leaf for an error message: its path, shape and dtype."""
    where = f"leaf `{path}`" if path else "one leaf"
    if not hasattr(leaf, "shape"):
        return f"{where} of type {type(leaf).__name__}"
    return f"{where} of shape {shape_of(leaf)} and dtype {leaf.dtype}"

"""Leaves of a batch: as arrays that can be cut into rows."""

from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np


def named_leaves(nest: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a nest with how to get to them, such as `[0]['x']`."""
    if isinstance(nest, Mapping):
        for key in nest:
            yield from named_leaves(nest[key], f"{path}[{key!r}]")
    elif isinstance(nest, (list, tuple)):
        for index, item in enumerate(nest):
            yield from named_leaves(item, f"{path}[{index}]")
    else:
        yield path, nest


def readable(leaf: Any) -> Any:
    """A leaf as a NumPy array or a tensor of the framework in use.

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
    """A tensor in the host's memory as a NumPy view; others as they are.

    Slicing is then free, and is nothing for a framework to compile.
    """
    if isinstance(leaf, np.ndarray):
        return leaf
    try:
        return np.asarray(memoryview(leaf))
    except (TypeError, ValueError, BufferError):
        return leaf  # elsewhere, or of a dtype that has no such view


def shape_of(leaf: Any) -> tuple[int | None, ...]:
    """The shape of an array or tensor, `()` of anything else."""
    return tuple(getattr(leaf, "shape", ()))


def check_batched(nest: Any) -> None:
    """Refuses an element, or its spec, in which nothing has rows.

    Raises:
        ValueError: If all leaves are scalars.
    """
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
    """How many rows a batch has: an integer, or in a graph a tensor.

    Args:
        nest: Nested structure of arrays, with `None` for what is not there.

    Raises:
        ValueError: If it is no batch, or its leaves differ in their rows.
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
    """A leaf for an error: where it is, its shape and dtype."""
    where = f"leaf `{path}`" if path else "one leaf"
    if not hasattr(leaf, "shape"):
        return f"{where} of type {type(leaf).__name__}"
    return f"{where} of shape {shape_of(leaf)} and dtype {leaf.dtype}"

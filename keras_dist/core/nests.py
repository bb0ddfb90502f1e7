"""A fast `keras.tree` for a step's values, most of which are flat.

The functions of `keras.tree` are slow, and on PyTorch each call leaves a
reference cycle that keeps tensors alive until the garbage collector runs.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

from keras import tree


def _is_flat(value: Any) -> bool:
    return type(value) in (list, tuple) and not any(
        isinstance(leaf, (list, tuple, dict)) for leaf in value
    )


def flatten(value: Any) -> list[Any]:
    """Returns the leaves of a nested value, `None` among them."""
    if _is_flat(value):
        return list(value)
    if not isinstance(value, (list, tuple, dict)):
        return [value]
    leaves: list[Any] = tree.flatten(value)
    return leaves


def pack(like: Any, leaves: Sequence[Any]) -> Any:
    """Returns a value with the structure of `like` and other leaves."""
    if _is_flat(like):
        return type(like)(leaves)
    if not isinstance(like, (list, tuple, dict)):
        return leaves[0]
    return tree.pack_sequence_as(like, list(leaves))


def map_leaves(fn: Callable[[Any], Any], value: Any) -> Any:
    """Returns a value with `fn` applied to each leaf."""
    return pack(value, [fn(leaf) for leaf in flatten(value)])

"""Arguments of a compiled function: what is traced, and what is not.

Arrays and per-replica values are traced. Anything else is part of what is
compiled; so it has to be hashable, like the structure that it is in.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from keras_dist.regroup import map_nest
from keras_dist.values import PerReplica
from keras_dist_jax.joined import JoinedPerReplica
from keras_dist_jax.joined import Shapes

# What stands for a traced value: an array, or one that is cut over replicas.
ARRAY, CUT, STACKED = "array", "cut", "stacked"
_array_types: set[type] = set()

Join = Callable[[PerReplica], JoinedPerReplica]
Wrap = Callable[[Any, bool, Shapes | None], Any]


def flatten(nest: Any, leaves: list[Any], join: Join, path: str) -> Any:
    """Appends the traced values of a nest; what is left can be hashed.

    Args:
        nest: Nest of arguments.
        leaves: List that traced values are appended to.
        join: Callable that makes one traced value of a `PerReplica`.
        path: String, what the nest is called in errors.

    Returns:
        The structure: tuples, placeholders and static values.

    Raises:
        TypeError: If a value that is not traced can't be hashed.
    """
    # One call for each container: this runs at every step.
    items = nest.items() if isinstance(nest, dict) else enumerate(nest)
    found: list[Any] = []
    for key, item in items:
        kind = type(item)
        if kind in _array_types:
            leaves.append(item)
            found.append(ARRAY)
        elif kind is JoinedPerReplica and item.joined is not None:
            leaves.append(item.joined)
            if item.shapes is None:
                found.append(STACKED if item.stacked else CUT)
            else:
                found.append(Uneven(item.shapes))
        elif kind is tuple or kind is list or kind is dict:
            found.append(flatten(item, leaves, join, f"{path}[{key!r}]"))
        else:
            found.append(_other(item, leaves, join, f"{path}[{key!r}]"))
    if isinstance(nest, dict):
        return dict, tuple(nest), tuple(found)
    return type(nest), tuple(found)


def _other(item: Any, leaves: list[Any], join: Join, path: str) -> Any:
    if isinstance(item, jax.core.Tracer):
        raise IsTracedError
    if isinstance(item, (jax.Array, np.ndarray, np.generic)):
        _array_types.add(type(item))
        leaves.append(item)
        return ARRAY
    if isinstance(item, PerReplica):
        joined = join(item)
        leaves.append(joined.joined)
        if joined.shapes is not None:
            return Uneven(joined.shapes)
        return STACKED if joined.stacked else CUT
    if isinstance(item, (list, tuple, Mapping)):
        return _Nest(item, leaves, join, path)
    try:
        hash(item)
    except TypeError as error:
        raise TypeError(
            "An argument of a compiled function that is no array is part of "
            f"what is compiled, and must be hashable. Received: `{path}` = "
            f"{item!r} of type {type(item).__name__}. Expected: an array, a "
            "per-replica value, or something hashable such as a number, a "
            "string or a tuple. Read it from the function's closure instead."
        ) from error
    return _Static(item)


@dataclass(frozen=True)
class Uneven:
    """Stands for a per-replica value whose components have these shapes."""

    shapes: Shapes


class IsTracedError(Exception):
    """An argument is part of a transformation of the user's own."""


class _Static:
    """A value that is part of what is compiled, and its type: 1 is not 1.0."""

    __slots__ = ("kind", "value")

    def __init__(self, value: Any) -> None:
        self.value, self.kind = value, type(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Static) or self.kind is not other.kind:
            return False
        return self.value is other.value or bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(self.value)


class _Nest:
    """A container of another type, such as a named tuple."""

    def __init__(
        self, nest: Any, leaves: list[Any], join: Join, path: str
    ) -> None:
        items: list[Any] = []
        self._like = map_nest(lambda leaf: items.append(leaf), nest)
        self._key = (type(nest), flatten(items, leaves, join, path))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Nest) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def build(self, leaves: Iterator[Any], wrap: Any) -> Any:
        items = iter(unflatten(self._key[1], leaves, wrap))
        return map_nest(lambda _: next(items), self._like)


def unflatten(
    structure: Any, leaves: Iterator[Any], wrap: Wrap
) -> Any:
    """The nest again, around other leaves.

    Args:
        structure: What `flatten` returned.
        leaves: Iterator over the traced values.
        wrap: Callable that makes a per-replica value of a traced one, given
            whether it is stacked, and the shapes of uneven components.
    """
    if structure is ARRAY:
        return next(leaves)
    if structure is CUT or structure is STACKED:
        return wrap(next(leaves), structure is STACKED, None)
    if isinstance(structure, Uneven):
        return wrap(next(leaves), True, structure.shapes)
    if isinstance(structure, _Static):
        return structure.value
    if isinstance(structure, _Nest):
        return structure.build(leaves, wrap)
    items = [unflatten(each, leaves, wrap) for each in structure[-1]]
    if structure[0] is dict:
        return dict(zip(structure[1], items, strict=True))
    return structure[0](items)

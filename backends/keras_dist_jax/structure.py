"""Arguments of compiled functions, split into traced and static values.

Arrays and per-replica values are traced. All else is a part of the program's
key, and must be hashable, like the structure that it is in.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import jax
import keras
import numpy as np

from keras_dist.core.nests import map_nest
from keras_dist.core.values import PerReplica
from keras_dist_jax.joined import JoinedPerReplica

# The placeholder for a traced array. The one for a per-replica value is the
# tuple of whether it is stacked, its shapes, and its layout.
ARRAY = "array"
_array_types: set[type] = set()

Join = Callable[[PerReplica], JoinedPerReplica]


def flatten(nest: Any, leaves: list[Any], join: Join) -> Any:
    """Appends a nest's traced values to `leaves`; returns its structure.

    `join` converts a `PerReplica` to one with a single traced array.

    Returns:
        Tuples, placeholders and static values, hashable if these are.
    """
    # One call for each container: this runs at every step.
    found: list[Any] = []
    for item in nest.values() if isinstance(nest, dict) else nest:
        kind = type(item)
        if kind in _array_types:
            leaves.append(item)
            found.append(ARRAY)
        elif kind is JoinedPerReplica and item.joined is not None:
            leaves.append(item.joined)
            found.append((item.stacked, item.shapes, item.layout))
        elif kind is tuple or kind is list or kind is dict:
            found.append(flatten(item, leaves, join))
        else:
            found.append(_other(item, leaves, join))
    if isinstance(nest, dict):
        return dict, tuple(nest), tuple(found)
    return type(nest), tuple(found)


def _other(item: Any, leaves: list[Any], join: Join) -> Any:
    if isinstance(item, jax.core.Tracer):
        raise IsTracedError
    if isinstance(item, (jax.Array, np.ndarray, np.generic)):
        _array_types.add(type(item))
        leaves.append(item)
        return ARRAY
    if isinstance(item, PerReplica):
        joined = join(item)
        leaves.append(joined.joined)
        return joined.stacked, joined.shapes, joined.layout
    if isinstance(item, (list, tuple, Mapping)):
        return _Nest(item, leaves, join)
    if isinstance(item, keras.Variable):
        return _Same(item)
    if hasattr(item, "__array__") and hasattr(item, "shape"):
        # A tensor of another framework, such as `tf.data` gives.
        leaves.append(np.asarray(item))
        return ARRAY
    return _Static(item)


class IsTracedError(Exception):
    """An argument is a tracer of a transformation of the user's own."""


class _Static:
    """A static value, compared with its type: 1 is not 1.0."""

    __slots__ = ("kind", "value")

    def __init__(self, value: Any) -> None:
        self.value, self.kind = value, type(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Static) or self.kind is not other.kind:
            return False
        if isinstance(self.value, float):  # 0.0 is not -0.0
            return repr(self.value) == repr(other.value)
        return self.value is other.value or bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(self.value)


class _Same:
    """A variable among the arguments, compared by identity and not by value."""

    def __init__(self, variable: keras.Variable) -> None:
        self.value = variable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _Nest:
    """A container of another type, such as a named tuple."""

    def __init__(self, nest: Any, leaves: list[Any], join: Join) -> None:
        items: list[Any] = []
        self._like = map_nest(lambda leaf: items.append(leaf), nest)
        self._key = (type(nest), flatten(items, leaves, join))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Nest) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def build(self, leaves: Iterator[Any]) -> Any:
        items = iter(unflatten(self._key[1], leaves))
        return map_nest(lambda _: next(items), self._like)


def unflatten(structure: Any, leaves: Iterator[Any]) -> Any:
    """Rebuilds a nest from its structure and an iterator over traced values."""
    if structure is ARRAY:
        return next(leaves)
    if isinstance(structure, (_Static, _Same)):
        return structure.value
    if isinstance(structure, _Nest):
        return structure.build(leaves)
    if isinstance(structure[0], bool):
        stacked, shapes, layout = structure
        return JoinedPerReplica(next(leaves), stacked, layout, None, shapes)
    items = [unflatten(each, leaves) for each in structure[-1]]
    if structure[0] is dict:
        return dict(zip(structure[1], items, strict=True))
    return structure[0](items)

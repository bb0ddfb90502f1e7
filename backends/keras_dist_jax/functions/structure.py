"""Arguments of compiled functions, split into traced and static values.

A program gives a flat list of arrays, and the outline of their nest is kept
beside it. If Python had to rebuild a nest to receive them, an interrupt could
come after the program has run and before its arrays are kept.
"""

import dataclasses
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import jax
import keras
import numpy as np

from keras_dist.plugins import PerReplica
from keras_dist.plugins import held_in
from keras_dist.plugins import leaves_of
from keras_dist.plugins import map_nest
from keras_dist.plugins import refuse_result
from keras_dist_jax.placement.layout import Layout
from keras_dist_jax.placement.per_replica import JoinedPerReplica

# The placeholder for a traced array. The one for a per-replica value is the
# tuple of whether it is stacked, and its layout.
_LEAF = "array"
_ARRAYS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)
_array_types: set[type] = set()

Join = Callable[[PerReplica], JoinedPerReplica]


def flatten(nest: Any, leaves: list[Any], join: Join) -> Any:
    """Appends a nest's traced values to `leaves`; returns its structure."""
    # One call for each container: this runs at every step.
    parts: list[Any] = []
    for item in nest.values() if isinstance(nest, dict) else nest:
        kind = type(item)
        if kind in _array_types:
            leaves.append(item)
            parts.append(_LEAF)
        elif kind is JoinedPerReplica and item.joined is not None:
            leaves.append(item.joined)
            parts.append((item.stacked, item.layout))
        elif kind is tuple or kind is list or kind is dict:
            parts.append(flatten(item, leaves, join))
        else:
            parts.append(_other(item, leaves, join))
    if isinstance(nest, dict):
        return dict, tuple(nest), tuple(parts)
    return type(nest), tuple(parts)


def _other(item: object, leaves: list[Any], join: Join) -> Any:
    if isinstance(item, jax.core.Tracer):
        raise IsTracedError
    if isinstance(item, _ARRAYS):
        _array_types.add(type(item))
        leaves.append(item)
        return _LEAF
    if isinstance(item, PerReplica):
        joined = join(item)
        leaves.append(joined.joined)
        return joined.stacked, joined.layout
    if isinstance(item, (list, tuple, Mapping)):
        return _Nest(item, leaves, join)
    if isinstance(item, keras.Variable):
        return _Static(item)
    if hasattr(item, "__array__") and hasattr(item, "shape"):
        # A tensor of another framework, such as `tf.data` gives.
        leaves.append(np.asarray(item))
        return _LEAF
    return _Static(item)


class IsTracedError(Exception):
    """An argument is a tracer of a transformation of the user's own."""


class _Static:
    """A static value, compared with its type; an object that has no `==` of
    its own must be the same, and is not kept alive."""

    __slots__ = ("_reference", "id", "kind")

    def __init__(self, value: Any) -> None:
        self.kind: Any = type(value)
        self.id: int | None = None
        self._reference = value
        equal: Any = self.kind.__eq__
        if equal is object.__eq__ or isinstance(value, keras.Variable):
            try:
                self._reference = weakref.ref(value)
            except TypeError:  # such as `None`
                return
            self.id = id(value)

    @property
    def value(self) -> Any:
        """The value; `None` if it is gone."""
        return self._reference if self.id is None else self._reference()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Static) or self.kind is not other.kind:
            return False
        mine, theirs = self.value, other.value
        if self.id is not None:
            return mine is theirs and mine is not None
        if isinstance(mine, float):  # 0.0 is not -0.0
            return repr(mine) == repr(theirs)
        return mine is theirs or bool(mine == theirs)

    def __hash__(self) -> int:
        return hash(self._reference) if self.id is None else self.id


def objects_in(structure: object) -> Iterator[Any]:
    """Yields the objects of a structure that it does not keep alive."""
    if isinstance(structure, _Static):
        if structure.id is not None:
            yield structure.value
    elif isinstance(structure, _Nest):
        yield from objects_in(structure.key)
    elif isinstance(structure, tuple):
        for item in structure:
            yield from objects_in(item)


class _Nest:
    """A container of another type, such as a named tuple."""

    def __init__(self, nest: Any, leaves: list[Any], join: Join) -> None:
        items: list[Any] = []
        self._like = map_nest(lambda leaf: items.append(leaf), nest)
        self.key = (type(nest), flatten(items, leaves, join))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Nest) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def build(self, leaves: Iterator[Any]) -> Any:
        items = iter(unflatten(self.key[1], leaves))
        return map_nest(lambda _: next(items), self._like)


def unflatten(structure: Any, leaves: Iterator[Any]) -> Any:
    """Rebuilds a nest from its structure and an iterator over traced values."""
    if structure is _LEAF:
        return next(leaves)
    if isinstance(structure, _Static):
        return structure.value
    if isinstance(structure, _Nest):
        return structure.build(leaves)
    if isinstance(structure[0], bool):
        stacked, layout = structure
        return JoinedPerReplica(next(leaves), stacked, layout)
    items = [unflatten(item, leaves) for item in structure[-1]]
    if structure[0] is dict:
        return dict(zip(structure[1], items, strict=True))
    return structure[0](items)


ARRAY_TYPES = (jax.Array, np.ndarray, np.generic)


@dataclasses.dataclass(frozen=True, eq=False)
class Joined:
    """A placeholder for a `JoinedPerReplica` in an outline."""

    stacked: bool
    layout: Layout


# A placeholder for an array in an outline.
ARRAY = object()


def packed(nest: object) -> tuple[list[Any], Any]:
    """Splits a result into the arrays that a program gives and an outline."""
    arrays: list[Any] = []

    def pack(leaf: object) -> Any:
        if isinstance(leaf, keras.Variable):
            leaf = leaf.value
        if isinstance(leaf, JoinedPerReplica):
            leaf = leaf.in_a_program()
            arrays.append(
                jax.lax.with_sharding_constraint(
                    leaf.joined, leaf.layout.sharded
                )
            )
            return Joined(leaf.stacked, leaf.layout)
        if isinstance(leaf, ARRAY_TYPES):
            arrays.append(leaf)
            return ARRAY
        check_constant(leaf)
        return leaf

    return arrays, map_nest(pack, nest)


def marks_of(outline: object) -> list[Any]:
    """Returns the placeholder of each array of an outline, in order."""
    return [
        leaf
        for leaf in leaves_of(outline)
        if leaf is ARRAY or isinstance(leaf, Joined)
    ]


def unpacked(outline: object, arrays: list[Any]) -> Any:
    """Rebuilds a result from the outline and the program's arrays."""
    # The most common results, without the calls of `map_nest`.
    if outline.__class__ is Joined:
        return JoinedPerReplica(arrays[0], outline.stacked, outline.layout)
    if outline is ARRAY:
        return arrays[0]
    rest = iter(arrays)

    def unpack(leaf: object) -> Any:
        if leaf is ARRAY:
            return next(rest)
        if leaf.__class__ is Joined:
            return unpacked(leaf, [next(rest)])
        return leaf

    return map_nest(unpack, outline)


def check_constant(value: object) -> None:
    """Raises `TraceError` if an object would take a tensor out of its trace."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in held_in(value)):
        refuse_result(value)

"""Nests: lists, tuples, named tuples and mappings; all else is a leaf."""

import contextlib
import dataclasses
import itertools
import numbers
import types
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_dist.core.components import VariableComponent
from keras_dist.core.values import Mirrored
from keras_dist.core.values import PerReplica
from keras_dist.errors import TraceError

_NESTS = "lists, tuples, dicts and named tuples"
_VALUES = (PerReplica, Mirrored)
# These objects have state that is meant to change.
_ALIVE = (keras.Layer, keras.Metric, keras.optimizers.Optimizer, keras.Variable)


def map_nest(fn: Callable[[Any], Any], nest: Any) -> Any:
    """Returns a nest of the same types with `fn` applied to each leaf."""
    kind = type(nest)
    # The usual ones, without calls of Python's in between.
    if kind is tuple or kind is list:
        return kind(map(partial(map_nest, fn), nest))
    if kind is dict:
        items = map(partial(map_nest, fn), nest.values())
        return dict(zip(nest, items, strict=True))
    if isinstance(nest, (list, tuple)):
        return _sequence_like(nest, [map_nest(fn, item) for item in nest])
    if hasattr(kind, "keys") and isinstance(nest, Mapping):
        return _mapping_like(nest, {k: map_nest(fn, nest[k]) for k in nest})
    return fn(nest)


def _is_mapping(value: Any) -> bool:
    # The class of an ABC answers slowly, and most values are leaves.
    return hasattr(type(value), "keys") and isinstance(value, Mapping)


def like(nest: Any, items: Mapping[Any, Any]) -> Any:
    """Makes a nest like another one from items by key or index."""
    if _is_mapping(nest):
        return _mapping_like(nest, {key: items[key] for key in nest})
    return _sequence_like(nest, [items[i] for i in range(len(nest))])


def leaves_of(nest: Any) -> list[Any]:
    """Returns the leaves of a nest, in order."""
    if isinstance(nest, (list, tuple)):
        items = list(nest)
    elif _is_mapping(nest):
        items = [nest[key] for key in nest]
    else:
        return [nest]
    return [leaf for item in items for leaf in leaves_of(item)]


def select(index: int, nest: Any) -> Any:
    """Replaces each per-replica value in a nest by one replica's component."""

    def own(leaf: Any) -> Any:
        if isinstance(leaf, _VALUES):
            return leaf.values[index]
        return leaf

    return map_nest(own, nest)


def check_counts(nest: Any, num_replicas: int) -> None:
    """Raises `ValueError` unless each value has `num_replicas` components."""

    def check(leaf: Any) -> None:
        if isinstance(leaf, _VALUES) and len(leaf.values) != num_replicas:
            raise ValueError(
                "A per-replica value must have a component for each replica. "
                f"Received: {len(leaf.values)} components in {leaf!r}. "
                f"Expected: {num_replicas}. The value may come from another "
                "strategy."
            )

    map_nest(check, nest)


def regroup(
    nests: Sequence[Any],
    wrap: Callable[[Sequence[Any]], Any] = PerReplica,
    always: Callable[[Any], bool] = lambda leaf: False,
    own: Callable[[Any, int], Any] = lambda leaf, index: leaf,
) -> Any:
    """Joins all replicas' nests, leaf by leaf. What is one object, or the
    components of one variable, stays, unless `always(leaf)`."""
    if len(nests) == 1:
        return _of_one(nests[0], own)

    def join(leaves: list[Any]) -> Any:
        first = leaves[0]
        if not always(first):
            if {*map(id, leaves)} == {id(first)}:
                return first
            variable = _variable_of(leaves)
            if variable is not None:
                return variable
        return wrap([*map(own, leaves, itertools.count())])

    return _regroup(list(nests), join, "result")


def always(leaf: Any) -> bool:
    """Makes `regroup` wrap every leaf."""
    return True


def _of_one(nest: Any, own: Callable[[Any, int], Any]) -> Any:
    """Applies `own` to a nest; returns the same object if nothing changes."""
    before = leaves_of(nest)
    after = [own(leaf, 0) for leaf in before]
    if all(new is old for new, old in zip(after, before, strict=True)):
        return nest
    leaves = iter(after)
    return map_nest(lambda _: next(leaves), nest)


def _regroup(
    nests: list[Any], join: Callable[[list[Any]], Any], path: str
) -> Any:
    first, shape = nests[0], _shape(nests[0])
    for index, nest in enumerate(nests):
        if nest is not first and _shape(nest) != shape:
            raise ValueError(
                "Replicas returned different structures. Received at "
                f"`{path}`: {_described(first)} from replica 0, "
                f"{_described(nest)} from replica {index}. Expected: the same "
                "lists, tuples and keys on each replica."
            )

    def joined(key: Any) -> Any:
        parts = [nest[key] for nest in nests]
        return _regroup(parts, join, f"{path}[{key!r}]")

    if isinstance(first, Mapping):
        return _mapping_like(first, {key: joined(key) for key in first})
    if isinstance(first, (list, tuple)):
        return _sequence_like(first, [joined(i) for i in range(len(first))])
    return join(nests)


def _variable_of(leaves: list[Any]) -> Any:
    """Returns the variable that has these components in order, or `None`."""
    if not isinstance(leaves[0], VariableComponent):
        return None
    container = leaves[0].container
    for index, leaf in enumerate(leaves):
        if not (
            isinstance(leaf, VariableComponent)
            and leaf.container is container
            and leaf.index == index
        ):
            return None
    return container


def _shape(nest: Any) -> Any:
    """Returns a description of a nest's top level, to compare structures."""
    if isinstance(nest, Mapping):
        return Mapping, set(nest)
    if isinstance(nest, (list, tuple)):
        return type(nest), len(nest)
    return None


def _described(nest: Any) -> str:
    if isinstance(nest, Mapping):
        return f"{type(nest).__name__} with keys {sorted(map(str, nest))}"
    if isinstance(nest, (list, tuple)):
        return f"{type(nest).__name__} of length {len(nest)}"
    return f"a {type(nest).__name__}"


def _sequence_like(nest: Any, items: list[Any]) -> Any:
    if hasattr(nest, "_fields"):  # a named tuple
        return type(nest)(*items)
    return type(nest)(items)


def _mapping_like(nest: Any, items: dict[Any, Any]) -> Any:
    if type(nest) is dict:
        return items
    default_factory = getattr(nest, "default_factory", None)
    if default_factory is not None:
        return type(nest)(default_factory, items)
    return type(nest)(items)


def _items(value: Any) -> list[Any] | None:
    """Returns the leaves of a nest without inner nests, else `None`."""
    kind = type(value)
    if kind is dict and set(map(type, value)) <= {str}:
        items = [value[key] for key in sorted(value)]
    elif kind in (list, tuple):
        items = list(value)
    else:
        return None
    for item in items:
        if isinstance(item, (list, tuple, dict)):
            return None
    return items


def flatten(value: Any) -> list[Any]:
    """Returns the leaves of a nested value, `None` among them."""
    items = _items(value)
    if items is not None:
        return items
    if not isinstance(value, (list, tuple, dict)):
        return [value]
    leaves: list[Any] = tree.flatten(value)
    return leaves


def pack(like: Any, leaves: Sequence[Any]) -> Any:
    """Returns a value with the structure of `like` and other leaves."""
    if _items(like) is not None:
        if type(like) is not dict:
            return type(like)(leaves)
        found = dict(zip(sorted(like), leaves, strict=True))
        return {key: found[key] for key in like}
    if not isinstance(like, (list, tuple, dict)):
        return leaves[0]
    return tree.pack_sequence_as(like, list(leaves))


def map_leaves(fn: Callable[[Any], Any], value: Any) -> Any:
    """Returns a value with `fn` applied to each leaf."""
    return pack(value, [fn(leaf) for leaf in flatten(value)])


def fields_of(value: Any) -> Mapping[str, Any]:
    """Returns an object's attributes, or a dataclass's fields, by name."""
    names = _declared(value)
    if names is None:
        return getattr(value, "__dict__", {})
    return {name: getattr(value, name, None) for name in names}


def _declared(value: Any) -> list[str] | None:
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    declared = getattr(type(value), "__attrs_attrs__", None)
    return None if declared is None else [each.name for each in declared]


def held_in(value: Any) -> Iterator[Any]:
    """Yields an object's attributes, or a function's or generator's values."""
    if isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # not assigned yet
                yield cell.cell_contents
    elif isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        yield from (frame.f_locals if frame else {}).values()
    elif not isinstance(value, (type, keras.Layer)):
        yield from fields_of(value).values()


def hidden_field(value: Any) -> str | None:
    """Returns the name of an attribute that holds a value to be traced, in an
    object that is not traced, or `None`."""
    kind = type(value)
    if kind.__module__ == "builtins" or isinstance(value, (*_VALUES, *_ALIVE)):
        return None
    is_data = _declared(value) is not None and not isinstance(value, type)
    for name, each in fields_of(value).items():
        for leaf in leaves_of(each):
            if isinstance(leaf, _VALUES) or (
                is_data
                and hasattr(leaf, "shape")
                and not isinstance(leaf, _ALIVE)
            ):
                return name
    return None


def refuse_result(value: Any) -> None:
    """Raises `TraceError` for an object that holds a traced tensor."""
    raise TraceError(
        "A compiled function returned an object that contains a tensor. "
        "Outside of the function, this tensor has no value. Received: a "
        f"{type(value).__name__}. Expected: tensors in {_NESTS}. Return the "
        "tensors, and make the object from them outside of the function."
    )


def refuse_objects(nest: Any, method: str, cause: Exception) -> None:
    """Raises `TypeError` if a method failed on an object in its argument."""
    for leaf in leaves_of(nest):
        for value in leaf.values if isinstance(leaf, _VALUES) else (leaf,):
            if _is_object(value):
                raise TypeError(
                    f"`{method}` takes tensors and numbers, in {_NESTS}. "
                    f"Received: {value!r} of type {type(value).__name__}. "
                    f"`{method}` does not look inside this object. Pass the "
                    "values that the object contains, in a dict for instance."
                ) from cause


def _is_object(value: Any) -> bool:
    if value is None:
        return False
    if _declared(value) is not None:
        return True
    plain = (numbers.Number, np.generic, str, bytes, list, tuple, Mapping)
    return not (
        isinstance(value, (*plain, *_VALUES))
        or hasattr(value, "shape")
        or hasattr(value, "__array__")
    )

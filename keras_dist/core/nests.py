"""Nests: lists, tuples, named tuples and mappings; all else is a leaf."""

import contextlib
import dataclasses
import itertools
import numbers
import types
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from functools import partial
from typing import Any

import keras
import numpy as np

from keras_dist.core.components import VariableComponent
from keras_dist.core.values import Mirrored
from keras_dist.core.values import PerReplica
from keras_dist.errors import TraceError

_NESTS = "lists, tuples, dicts and named tuples"
_VALUES = (PerReplica, Mirrored)
# These objects have state that is meant to change.
_ALIVE = (keras.Layer, keras.Metric, keras.optimizers.Optimizer, keras.Variable)


def map_nest(fn: Callable[[Any], Any], nest: Any) -> Any:
    """Returns a nest of the same types with `fn` applied to each leaf, in the
    order of `leaves_of`."""
    kind = type(nest)
    # The usual ones, with few calls of Python's in between.
    if kind is tuple or kind is list:
        return kind(map(partial(map_nest, fn), nest))
    if kind is dict:
        if not nest:
            return {}
        order = _sorted(nest)
        values = map(partial(map_nest, fn), map(nest.__getitem__, order))
        items = dict(zip(order, values, strict=True))
        return dict(zip(nest, map(items.__getitem__, nest), strict=True))
    if not (isinstance(nest, (list, tuple)) or hasattr(kind, "keys")):
        return fn(nest)
    keys = keys_of(nest)
    if keys is None:
        return fn(nest)
    return _like(nest, {key: map_nest(fn, nest[key]) for key in keys})


def keys_of(nest: object) -> Sequence[Any] | None:
    """Returns the keys or indices of a nest in order; `None` for a leaf.

    Keys of a mapping are sorted, so that equal ones meet, whichever a replica
    or worker has set first.
    """
    if isinstance(nest, (list, tuple)):
        return range(len(nest))
    # The class of an ABC answers slowly, and most values are leaves.
    if not (hasattr(type(nest), "keys") and isinstance(nest, Mapping)):
        return None
    return _sorted(nest)


def _sorted(keys: Iterable[Any]) -> list[Any]:
    try:
        return sorted(keys)
    except TypeError:  # of several types
        return sorted(keys, key=lambda key: (type(key).__name__, repr(key)))


def leaves_of(nest: Any) -> list[Any]:
    """Returns the leaves of a nest, in order, `None` among them."""
    keys = keys_of(nest)
    if keys is None:
        return [nest]
    leaves = []
    for key in keys:
        item = nest[key]
        if isinstance(item, (list, tuple)) or hasattr(type(item), "keys"):
            leaves += leaves_of(item)
        else:
            leaves.append(item)
    return leaves


def named_leaves(nest: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a nest, in order, with paths such as `[0]['x']`."""
    keys = keys_of(nest)
    if keys is None:
        yield path, nest
        return
    for key in keys:
        yield from named_leaves(nest[key], f"{path}[{key!r}]")


def pack(nest: object, leaves: Iterable[Any]) -> Any:
    """Returns a nest of the same types with other leaves, in order."""
    left = iter(leaves)

    def filled(nest: Any) -> Any:
        keys = keys_of(nest)
        if keys is None:
            return next(left)
        return _like(nest, {key: filled(nest[key]) for key in keys})

    return filled(nest)


def select(index: int, nest: object) -> Any:
    """Replaces each per-replica value in a nest by one replica's component."""

    def component(leaf: object) -> Any:
        if isinstance(leaf, _VALUES):
            return leaf.values[index]
        return leaf

    return map_nest(component, nest)


def check_counts(nest: object, num_replicas: int) -> None:
    """Raises `ValueError` unless each value has `num_replicas` components."""

    def check(leaf: object) -> None:
        if isinstance(leaf, _VALUES) and len(leaf.values) != num_replicas:
            raise ValueError(
                "A per-replica value must have a component for each replica.\n"
                f"Received: {len(leaf.values)} components in {leaf!r}. "
                f"Expected: {num_replicas}. The value may come from another "
                "strategy."
            )

    map_nest(check, nest)


def regroup(
    nests: Sequence[Any],
    wrap: Callable[[Sequence[Any]], Any] = PerReplica,
    always: Callable[[Any], bool] = lambda leaf: False,
    snapshot: Callable[[Any, int], Any] = lambda leaf, index: leaf,
) -> Any:
    """Joins all replicas' nests, leaf by leaf. What is one object, or the
    components of one variable, stays, unless `always(leaf)`."""
    if len(nests) == 1:
        return _of_one(nests[0], snapshot)

    def join(leaves: list[Any]) -> Any:
        first = leaves[0]
        if not always(first):
            if {*map(id, leaves)} == {id(first)}:
                return first
            variable = _variable_of(leaves)
            if variable is not None:
                return variable
        return wrap([*map(snapshot, leaves, itertools.count())])

    return joined(nests, join)


def always(leaf: object) -> bool:
    """Makes `regroup` wrap every leaf."""
    return True


def _of_one(nest: object, snapshot: Callable[[Any, int], Any]) -> Any:
    """Applies `snapshot` to a nest; returns the same object if unchanged."""
    before = leaves_of(nest)
    after = [snapshot(leaf, 0) for leaf in before]
    if all(new is old for new, old in zip(after, before, strict=True)):
        return nest
    return pack(nest, after)


def joined(
    nests: Sequence[Any],
    join: Callable[[list[Any]], Any],
    of: str = "replica",
    path: str = "result",
) -> Any:
    """Calls `join` with each leaf of nests of one structure, and packs that."""
    first, shape = nests[0], _shape(nests[0])
    for index, nest in enumerate(nests):
        if nest is not first and _shape(nest) != shape:
            raise ValueError(
                f"{of.capitalize()}s returned different structures. Received "
                f"at `{path}`: {_described(first)} from {of} 0, "
                f"{_described(nest)} from {of} {index}. Expected: the same "
                f"lists, tuples and keys from each {of}."
            )
    if shape is None:  # a leaf
        return join(list(nests))
    items = {}
    for key in keys_of(first) or ():
        children = [nest[key] for nest in nests]
        items[key] = joined(children, join, of, f"{path}[{key!r}]")
    return _like(first, items)


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


def _shape(nest: object) -> Any:
    """Returns a description of a nest's top level, to compare structures."""
    if isinstance(nest, Mapping):
        return Mapping, set(nest)
    if isinstance(nest, (list, tuple)):
        return type(nest), len(nest)
    return None


def _described(nest: object) -> str:
    if isinstance(nest, Mapping):
        return f"{type(nest).__name__} with keys {sorted(map(str, nest))}"
    if isinstance(nest, (list, tuple)):
        return f"{type(nest).__name__} of length {len(nest)}"
    return f"a {type(nest).__name__}"


def _like(nest: Any, items: Mapping[Any, Any]) -> Any:
    """Makes a nest like another one from items by key or index."""
    kind = type(nest)
    if isinstance(nest, (list, tuple)):
        sequence = [items[index] for index in range(len(nest))]
        if hasattr(nest, "_fields"):  # a named tuple
            return kind(*sequence)
        return kind(sequence)
    mapping = {key: items[key] for key in nest}
    if kind is dict:
        return mapping
    default_factory = getattr(nest, "default_factory", None)
    if default_factory is not None:
        return kind(default_factory, mapping)
    return kind(mapping)


def fields_of(value: object) -> Mapping[str, Any]:
    """Returns an object's attributes, or a dataclass's fields, by name."""
    names = _declared(value)
    if names is None:
        return getattr(value, "__dict__", {})
    return {name: getattr(value, name, None) for name in names}


def _declared(value: object) -> list[str] | None:
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    declared = getattr(type(value), "__attrs_attrs__", None)
    return None if declared is None else [field.name for field in declared]


def held_in(value: object) -> Iterator[Any]:
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


def hidden_field(value: object) -> str | None:
    """Returns the name of an attribute that holds a value to be traced, in an
    object that is not traced, or `None`."""
    kind = type(value)
    if kind.__module__ == "builtins" or isinstance(value, (*_VALUES, *_ALIVE)):
        return None
    is_data = _declared(value) is not None and not isinstance(value, type)
    for name, field in fields_of(value).items():
        for leaf in leaves_of(field):
            if isinstance(leaf, _VALUES) or (
                is_data
                and hasattr(leaf, "shape")
                and not isinstance(leaf, _ALIVE)
            ):
                return name
    return None


def refuse_result(value: object) -> None:
    """Raises `TraceError` for an object that holds a traced tensor."""
    raise TraceError(
        "A compiled function returned an object that contains a tensor.\n"
        "Outside of the function, this tensor has no value. Received: a "
        f"{type(value).__name__}. Expected: tensors in {_NESTS}. Return the "
        "tensors, and make the object from them outside of the function."
    )


def refuse_objects(nest: object, method: str, cause: Exception) -> None:
    """Raises `TypeError` if a method failed on an object in its argument."""
    for leaf in leaves_of(nest):
        for value in leaf.values if isinstance(leaf, _VALUES) else (leaf,):
            if _is_object(value):
                raise TypeError(
                    f"`{method}` takes tensors and numbers, in {_NESTS}.\n"
                    f"Received: {value!r} of type {type(value).__name__}. "
                    f"`{method}` does not look inside this object. Pass the "
                    "values that the object contains, in a dict for instance."
                ) from cause


def _is_object(value: object) -> bool:
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

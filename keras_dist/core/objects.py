"""Checks for objects that hold tensors where keras_dist would not see them.

Values pass `strategy.run`, reductions and compiled functions in lists, tuples,
named tuples and mappings. A dataclass, or an object of any other class, is one
leaf: tensors in it would be missed.
"""

import contextlib
import dataclasses
import numbers
import types
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from keras_dist.core.nests import leaves_of
from keras_dist.core.values import Mirrored
from keras_dist.core.values import PerReplica
from keras_dist.errors import TraceError

_NESTS = "lists, tuples, dicts and named tuples"
_VALUES = (PerReplica, Mirrored)
# These objects have state that is meant to change.
_ALIVE = (
    keras.Layer,
    keras.Metric,
    keras.optimizers.Optimizer,
    keras.Variable,
)


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
    """Yields the attributes of an object, or the closure of a function.

    Of a generator, these are the local variables.
    """
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
    """Returns the name of an attribute that holds a value to be traced.

    A compiled function would not notice when the attribute of an argument that
    is not traced changes. The result is `None` if there is no such attribute.
    """
    kind = type(value)
    if kind.__module__ == "builtins" or isinstance(value, (*_VALUES, *_ALIVE)):
        return None
    is_data = _declared(value) is not None and not isinstance(value, type)
    for name, each in fields_of(value).items():
        for leaf in leaves_of(each):
            if isinstance(leaf, _VALUES) or (
                is_data and hasattr(leaf, "shape") and not _is_alive(leaf)
            ):
                return name
    return None


def _is_alive(value: Any) -> bool:
    return isinstance(value, _ALIVE)


def refuse_result(value: Any) -> None:
    """Raises `TraceError` for an object that holds a traced tensor."""
    raise TraceError(
        "A compiled function returned an object with a tensor in it, which "
        f"has no value outside. Received: a {type(value).__name__}. Expected: "
        f"tensors in {_NESTS}. Return the tensors, and make the object of "
        "them outside."
    )


def refuse_objects(nest: Any, method: str, cause: Exception) -> None:
    """Raises `TypeError` if a method failed on an object in its argument.

    Args:
        nest: The argument of the method.
        method: String, the name of the method.
        cause: The exception that the method raised.
    """
    for leaf in leaves_of(nest):
        for value in leaf.values if isinstance(leaf, _VALUES) else (leaf,):
            if _is_object(value):
                raise TypeError(
                    f"`{method}` takes tensors and numbers, in {_NESTS}. "
                    f"Received: {value!r} of type {type(value).__name__}, "
                    "which it does not look into. Give it the values that "
                    "are in it, in a dict for instance."
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

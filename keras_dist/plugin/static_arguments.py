"""Checks of the arguments that a compiled function does not trace."""

import inspect
from collections.abc import Mapping
from typing import Any

from keras_dist.core.objects import hidden_field
from keras_dist.core.regroup import leaves_of
from keras_dist.plugin.front_end import CompiledFunction


def check_arguments(function: CompiledFunction, args: Any, kwargs: Any) -> None:
    """Refuses what is neither traced nor comparable by a later call.

    Raises `TypeError` if an argument that is no tensor can't be hashed, or
    holds tensors or per-replica values.
    """
    if isinstance(args, (list, tuple)) and isinstance(kwargs, Mapping):
        for leaf in leaves_of((args, kwargs)):
            if hasattr(leaf, "shape"):
                continue
            field = hidden_field(leaf)
            if field is not None:
                raise TypeError(_of_object(function, args, kwargs, leaf, field))
            if not _is_hashable(leaf):
                raise TypeError(_message(function, args, kwargs, leaf))


def _is_hashable(leaf: Any) -> bool:
    try:
        hash(leaf)
    except TypeError:
        return False
    return True


def _message(
    function: CompiledFunction, args: Any, kwargs: Any, leaf: Any
) -> str:
    return (
        f"Argument {_name(function, args, kwargs, leaf)} of the compiled "
        f"function '{function.name}' can't be hashed, and is no tensor. "
        f"Received: {leaf!r} of type {type(leaf).__name__}. Expected: a "
        "tensor or array, which is traced, or something hashable, of which "
        "each value is compiled on its own. Pass a tuple in place of a set, "
        "give the class a `__hash__`, or let the function close over it."
    )


def _of_object(
    function: CompiledFunction, args: Any, kwargs: Any, leaf: Any, field: str
) -> str:
    return (
        f"Argument {_name(function, args, kwargs, leaf)} of the compiled "
        f"function '{function.name}' is an object with values in it, which "
        f"would not be seen to change. Received: {leaf!r} of type "
        f"{type(leaf).__name__}, with a value in `{field}`. Expected: tensors "
        "and per-replica values in lists, tuples, dicts and named tuples. "
        "Pass the values, in a dict for instance, and make the object of them "
        "in the function."
    )


def _name(function: CompiledFunction, args: Any, kwargs: Any, leaf: Any) -> str:
    try:
        bound = inspect.signature(function.python_function).bind(
            *args, **kwargs
        )
        named = bound.arguments
    except (TypeError, ValueError):  # the call itself will raise
        named = {**{str(i): arg for i, arg in enumerate(args)}, **kwargs}
    for name, value in named.items():
        if any(each is leaf for each in leaves_of(value)):
            return f"`{name}`"
    return "of unknown name"

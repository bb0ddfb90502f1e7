"""Keys of equations and programs, equal only where they compute alike.

Objects of which nothing is known are equal only to themselves. So a key is
compared while what it was made of is alive.
"""

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

# By an equation: parameters that don't change its results. The derivatives
# were taken before, and their rules are new functions in each trace.
_UNUSED = {
    "checkpoint": {"policy"},
    "custom_jvp_call": {"jvp_jaxpr_fun"},
    "custom_vjp_call": {"bwd", "fwd_jaxpr_thunk", "out_trees"},
    "remat2": {"policy"},
}
_VALUES = (bool, int, float, complex, str, bytes, type(None))


def equation_key(equation: Any, keys: Mapping[Any, Any]) -> Any:
    """Returns a key of an equation.

    `keys` has those of the variables that it takes.
    """
    name = equation.primitive.name
    unused = _UNUSED.get(name, ())
    return (
        name,
        tuple(
            (key, _param_key(value))
            for key, value in sorted(equation.params.items())
            if key not in unused
        ),
        tuple(atom_key(atom, keys) for atom in equation.invars),
    )


def atom_key(atom: Any, keys: Mapping[Any, Any]) -> Any:
    """Returns a key of a literal, or that of a variable."""
    if isinstance(atom, Literal):
        return "literal", constant_key(atom.val), str(atom.aval)
    return keys[atom]


def constant_key(value: Any) -> Any:
    """Returns a key that is equal for equal constants.

    A constant whose elements can't be read here is equal only to itself.
    """
    if isinstance(value, jax.Array) and (
        isinstance(value, jax.core.Tracer)
        or not value.is_fully_addressable
        or jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
    ):
        return "outside", id(value)
    array = np.asarray(value)
    return "constant", str(array.dtype), array.shape, array.tobytes()


def _program_key(program: Any) -> Any:
    """Returns a key of a `Jaxpr`, or of a `ClosedJaxpr` and its constants."""
    jaxpr = getattr(program, "jaxpr", program)
    consts = tuple(map(constant_key, getattr(program, "consts", ())))
    # Variables are numbered in the order in which they come.
    known: dict[Any, Any] = {}
    for var in (*jaxpr.constvars, *jaxpr.invars):
        known[var] = "variable", len(known), str(var.aval)
    equations = []
    for equation in jaxpr.eqns:
        equations.append(equation_key(equation, known))
        for var in equation.outvars:
            known[var] = "variable", len(known), str(var.aval)
    outputs = tuple(atom_key(atom, known) for atom in jaxpr.outvars)
    return "program", consts, tuple(equations), outputs


def _param_key(value: Any) -> Any:
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        return _program_key(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(_param_key, value))
    if isinstance(value, Mapping):
        return tuple(
            (str(key), _param_key(each)) for key, each in value.items()
        )
    if isinstance(value, (np.ndarray, jax.Array)):
        return constant_key(value)
    if callable(value) and not isinstance(value, type):
        return _function_key(value, ())
    return str(value)


def _function_key(function: Any, within: tuple[int, ...]) -> Any:
    """Returns a key that is equal for functions that do the same.

    They have the same code, and alike values in their closures and defaults.
    `within` has the ids of the functions that hold this one.
    """
    if id(function) in within:  # its closure has the function itself
        return "again", within.index(id(function))
    within = (*within, id(function))

    def key(value: Any) -> Any:
        return _held_key(value, within)

    def named(values: Mapping[str, Any]) -> Any:
        return tuple((name, key(value)) for name, value in values.items())

    if isinstance(function, types.FunctionType):
        cells = function.__closure__ or ()
        return (
            id(function.__code__),
            id(function.__globals__),
            tuple(map(key, map(_content, cells))),
            key(function.__defaults__),
            named(function.__kwdefaults__ or {}),
        )
    if isinstance(function, types.MethodType):
        return key(function.__func__), key(function.__self__)
    if isinstance(function, functools.partial):
        return key(function.func), key(function.args), named(function.keywords)
    # JAX's wrapper of host callbacks is one.
    if dataclasses.is_dataclass(function) and _is_frozen(function):
        return (
            type(function),
            tuple(
                key(getattr(function, field.name))
                for field in dataclasses.fields(function)
            ),
        )
    return "object", id(function)


def _is_frozen(instance: Any) -> bool:
    return bool(instance.__dataclass_params__.frozen)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty, as long as nothing was assigned
        return cell


def _held_key(value: Any, within: tuple[int, ...]) -> Any:
    if isinstance(value, _VALUES):
        return type(value), repr(value)
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return constant_key(value)
    if isinstance(value, jax.tree_util.PyTreeDef):
        return value
    if isinstance(value, tuple):
        return type(value), tuple(_held_key(each, within) for each in value)
    if callable(value) and not isinstance(value, type):
        return _function_key(value, within)
    return "object", id(value)

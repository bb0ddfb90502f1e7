"""Walks through programs of JAX (jaxprs): their equations, live parts, calls.

A `ClosedJaxpr` has constants, a `Jaxpr` has none; most functions here take
either.

Equations and programs have keys, equal only where they compute alike. Objects
of which nothing is known are equal only to themselves. So a key is compared
while what it was made of is alive.
"""

import dataclasses
import functools
import types
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.extend.core import Jaxpr
from jax.extend.core import Literal
from jax.extend.core import gensym
from jax.extend.core import jaxprs_in_params

# The axis of the mesh that replicas meet over.
AXIS = "replica"
# Equations that name the axis, without a meeting.
_MEET_NOBODY = {"axis_index", "pvary"}
# Parameters with the one program that an equation calls on its own operands.
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_CONTROL_FLOW = {"cond", "scan", "while"}


def opened(program: Any) -> Any:
    """Returns the `Jaxpr` of a `ClosedJaxpr`, or the `Jaxpr` itself."""
    return getattr(program, "jaxpr", program)


def inner(equation: Any) -> list[Any]:
    """Returns the `Jaxpr`s among an equation's parameters."""
    return [opened(each) for each in jaxprs_in_params(equation.params)]


def called(equation: Any) -> Any:
    """Returns the program that an equation calls on its operands, or `None`.

    Control flow calls none.
    """
    if equation.primitive.name in _CONTROL_FLOW:
        return None
    found = (equation.params.get(key) for key in _CALLS)
    return next((program for program in found if program is not None), None)


def variables(atoms: Sequence[Any]) -> list[Any]:
    """Returns the atoms that are no literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def is_collective(equation: Any) -> bool:
    """Tells whether an equation is a collective of the replicas."""
    axes = equation.params.get("axes", equation.params.get("axis_name", ()))
    names = axes if isinstance(axes, (tuple, list)) else (axes,)
    return AXIS in names and equation.primitive.name not in _MEET_NOBODY


def meets_inside(equation: Any) -> bool:
    """Tells whether the programs of an equation have a collective."""
    return any(
        is_collective(each) or meets_inside(each)
        for program in inner(equation)
        for each in program.eqns
    )


def calls_back(equation: Any) -> bool:
    """Tells whether an equation calls back to Python, which may raise."""
    return "callback" in equation.primitive.name or any(
        map(has_callbacks, inner(equation))
    )


def has_callbacks(jaxpr: Any) -> bool:
    """Tells whether a program calls back to Python, which may raise."""
    return any(map(calls_back, jaxpr.eqns))


def live(equations: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
    """Returns the equations that results need, and those with callbacks."""
    needed = set(variables(outvars))
    found = []
    for equation in reversed(equations):
        if needed.intersection(equation.outvars) or calls_back(equation):
            found.append(equation)
            needed.update(variables(equation.invars))
    return found[::-1]


def walk(
    program: Any,
    arguments: Sequence[Any],
    enters: Callable[[Any], Any],
) -> list[Any]:
    """Runs a program, equation by equation.

    `enters` takes an equation, and returns a program to walk through in its
    place, or `None`.
    """
    jaxpr = opened(program)
    consts = getattr(program, "consts", ())
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        entered = enters(equation)
        results = (
            bind(equation, inputs)
            if entered is None
            else walk(entered, inputs, enters)
        )
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def rewritten(program: Any, change: Callable[[Any], Any]) -> Any:
    """Replaces each equation of a program, and of those inside of it."""
    if isinstance(program, ClosedJaxpr):
        return program.replace(jaxpr=rewritten(program.jaxpr, change))

    def param(value: Any) -> Any:
        if isinstance(value, (ClosedJaxpr, Jaxpr)):
            return rewritten(value, change)
        if isinstance(value, (tuple, list)) and any(
            isinstance(item, (ClosedJaxpr, Jaxpr)) for item in value
        ):
            return type(value)(map(param, value))
        return value

    def replaced(equation: Any) -> Any:
        params = {key: param(each) for key, each in equation.params.items()}
        return change(equation.replace(params=params))

    return program.replace(eqns=[*map(replaced, program.eqns)])


@functools.cache
def _empty() -> Any:
    """Returns a program without arguments and equations, as a template."""
    return jax.make_jaxpr(lambda: ())().jaxpr


def bind(equation: Any, inputs: Sequence[Any]) -> list[Any]:
    """Runs one equation."""
    fresh = gensym()
    # A literal of one program may be a computed value of another.
    taken = [fresh(atom.aval) for atom in equation.invars]
    alone = _empty().replace(
        invars=taken,
        outvars=list(equation.outvars),
        eqns=[equation.replace(invars=taken)],
        effects=equation.effects,
    )
    results: list[Any] = jax.core.eval_jaxpr(alone, (), *inputs)
    return results


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

"""One program for replicas with values of different shapes.

It holds the replica function once for each variant of shapes. Each device runs
the parts of its own variant, and all devices run each collective together, on
the same shapes.
"""

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend.core import Literal

from keras_dist.errors import ReplicaDivergenceError
from keras_dist.errors import UnsupportedModelError
from keras_dist_jax import jaxprs
from keras_dist_jax.jax_internals import is_program
from keras_dist_jax.jax_internals import opened


class Lockstep:
    """Variants of one program, split at their collectives, and at updates."""

    def __init__(
        self,
        programs: Sequence[Any],
        is_update: Callable[[Any], bool] = lambda equation: False,
    ) -> None:
        self._variants = [_Variant(each, is_update) for each in programs]
        kinds = [variant.collectives() for variant in self._variants]
        if any(kind != kinds[0] for kind in kinds):
            raise ReplicaDivergenceError(
                "Replicas with different numbers of rows took different "
                f"paths. Received: collectives {kinds}. Expected: the same "
                "collectives, with the same shapes, on each replica. Look "
                "for Python code that branches on shapes, and for "
                "collectives of values with an axis of rows."
            )

    def same_results(self) -> list[bool]:
        """Tells for each result whether all variants compute it alike."""
        keys = [variant.result_keys() for variant in self._variants]
        return [
            all(k == each[0] for k in each) for each in zip(*keys, strict=True)
        ]

    def program(
        self, variant_of: Sequence[int], arguments: Sequence[Any]
    ) -> Any:
        """Makes the one program, given the variant of each replica."""

        def run(arguments: Sequence[Any]) -> list[Any]:
            index = lax.axis_index(jaxprs.AXIS)
            return self._run(jnp.asarray(variant_of)[index], arguments)

        return jax.make_jaxpr(run)(arguments)

    def _run(self, variant: Any, arguments: Sequence[Any]) -> list[Any]:
        """Runs on each device the device's own variant."""
        values = [each.start(arguments) for each in self._variants]
        count = len(self._variants[0].meetings)
        for index in range(count):
            self._run_part(variant, index, values)
            self._meet(variant, index, values)
        last = [each.parts[count] for each in self._variants]
        if count and not any(map(jaxprs.calls_back, itertools.chain(*last))):
            # The variants' last parts are mostly equal, and the compiler merges
            # them, which it can't do across the branches of a switch.
            for each, own in zip(self._variants, values, strict=True):
                own.update(jaxprs.computed(each.parts[count], own))
        else:
            self._run_part(variant, count, values)
        results = [each.results for each in self._variants]
        return _selected(variant, results, values)

    def _run_part(self, variant: Any, index: int, values: list[Any]) -> None:
        names = [each.leaving(index) for each in self._variants]

        def branch(own: int) -> Any:
            def run() -> list[list[Any]]:
                part = self._variants[own].parts[index]
                computed = jaxprs.computed(part, values[own])
                return [
                    [
                        computed[v]
                        if other == own
                        else jnp.zeros(v.aval.shape, v.aval.dtype)
                        for v in leaving
                    ]
                    for other, leaving in enumerate(names)
                ]

            return run

        branches = [branch(own) for own in range(len(self._variants))]
        found = lax.switch(variant, branches)
        for own, leaving, new in zip(values, names, found, strict=True):
            own.update(zip(leaving, new, strict=True))

    def _meet(self, variant: Any, index: int, values: list[Any]) -> None:
        meetings = [each.meetings[index] for each in self._variants]
        inputs = [meeting.invars for meeting in meetings]
        results = jaxprs.bind(meetings[0], _selected(variant, inputs, values))
        for own, meeting in zip(values, meetings, strict=True):
            own.update(zip(meeting.outvars, results, strict=True))


class _Variant:
    """One variant's program, as the parts between its collectives."""

    def __init__(self, program: Any, is_update: Callable[[Any], bool]) -> None:
        program = _flat(program)
        jaxpr = opened(program)
        self._arguments = list(jaxpr.invars)
        self._consts = dict(zip(jaxpr.constvars, program.consts, strict=True))
        self.results = list(jaxpr.outvars)
        self._equations = jaxprs.live(jaxpr.eqns, self.results)
        self.meetings: list[Any] = []
        self.parts: list[list[Any]] = [[]]
        for equation in self._equations:
            if jaxprs.is_collective(equation) or is_update(equation):
                self.meetings.append(equation)
                self.parts.append([])
            else:
                self.parts[-1].append(equation)

    def collectives(self) -> list[str]:
        found = []
        for equation in self.meetings:
            shapes = [var.aval.str_short() for var in equation.invars]
            settings = [
                f", {name}={value}"
                for name, value in sorted(equation.params.items())
                if name not in ("axes", "axis_name")
                and value is not None
                and jaxprs.is_collective(equation)
            ]
            found.append(
                f"{equation.primitive.name} of {', '.join(shapes)}"
                f"{''.join(settings)}"
            )
        return found

    def start(self, arguments: Sequence[Any]) -> dict[Any, Any]:
        given = dict(zip(self._arguments, arguments, strict=True))
        return {**self._consts, **given}

    def leaving(self, index: int) -> list[Any]:
        """Returns the variables of a part that later equations need."""
        made = {v: None for e in self.parts[index] for v in e.outvars}
        later = itertools.chain(self.meetings[index:], *self.parts[index + 1 :])
        needed = {v for e in later for v in jaxprs.variables(e.invars)}
        needed.update(jaxprs.variables(self.results))
        return [var for var in made if var in needed]

    def result_keys(self) -> list[Any]:
        """Returns a key for each result, equal where it is computed alike."""
        keys: dict[Any, Any] = {
            var: ("argument", i) for i, var in enumerate(self._arguments)
        }
        keys |= {var: constant_key(c) for var, c in self._consts.items()}
        meetings = {id(each): i for i, each in enumerate(self.meetings)}
        for equation in self._equations:
            own: Any = meetings.get(id(equation))
            if own is not None:
                own = "meeting", own
            else:
                own = equation_key(equation, keys)
            for position, var in enumerate(equation.outvars):
                keys[var] = hash((own, position))
        return [atom_key(atom, keys) for atom in self.results]


def _selected(variant: Any, atoms: Any, values: list[Any]) -> list[Any]:
    """Selects, on each device, the values of atoms in the device's variant."""
    each = [
        [jaxprs.value_of(atom, own) for atom in of_variant]
        for of_variant, own in zip(atoms, values, strict=True)
    ]
    return [_select(variant, column) for column in zip(*each, strict=True)]


def _select(variant: Any, values: Sequence[Any]) -> Any:
    if all(value is values[0] for value in values):
        return values[0]
    return lax.select_n(variant, *values)


def _flat(program: Any) -> Any:
    """Inlines the functions of a program that have collectives inside."""
    jaxpr = opened(program)
    if not any(map(jaxprs.meets_inside, jaxpr.eqns)):
        return program
    arguments = [
        jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
        for var in jaxpr.invars
    ]

    def inlined(*arguments: Any) -> list[Any]:
        return jaxprs.walk(program, arguments, _to_inline)

    return _flat(jax.make_jaxpr(inlined)(*arguments))


def _to_inline(equation: Any) -> Any:
    if not jaxprs.meets_inside(equation):
        return None
    program = jaxprs.called(equation)
    if program is not None:
        return program
    raise UnsupportedModelError(
        "Replicas can't wait for each other inside of control flow in a step "
        "where they have different numbers of rows. Received: a collective "
        f"inside of `{equation.primitive.name}`. Expected: losses, metrics, "
        "updates and synchronized statistics outside of `cond`, `scan`, "
        "`while_loop` and recurrent cells. Move the collective out, or drop "
        "the partial batch."
    )


# For each kind of equation, the parameters that don't change its results.
# Derivatives are taken before, and each trace makes new functions for their
# rules.
_UNUSED = {
    "checkpoint": {"policy"},
    "custom_jvp_call": {"jvp_jaxpr_fun"},
    "custom_vjp_call": {"bwd", "fwd_jaxpr_thunk", "out_trees"},
    "remat2": {"policy"},
}
_VALUES = (bool, int, float, complex, str, bytes, type(None))


def equation_key(equation: Any, keys: Mapping[Any, Any]) -> Any:
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
    if isinstance(atom, Literal):
        return "literal", constant_key(atom.val), str(atom.aval)
    return keys[atom]


def constant_key(value: Any) -> Any:
    """Returns a key that is equal for equal constants that can be read."""
    if isinstance(value, jax.Array) and (
        isinstance(value, jax.core.Tracer)
        or not value.is_fully_addressable
        or jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
    ):
        return "outside", id(value)
    array = np.asarray(value)
    return "constant", str(array.dtype), array.shape, array.tobytes()


def _program_key(program: Any) -> Any:
    jaxpr = opened(program)
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
    if is_program(value):
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
    """Returns a key that is equal for functions that do the same."""
    # They have the same code, and alike values in their closures and defaults.
    # `within` has the ids of the functions that hold this one.
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
    params = getattr(function, "__dataclass_params__", None)
    if params is not None and params.frozen:
        fields = [field.name for field in dataclasses.fields(function)]
        return type(function), tuple(key(getattr(function, f)) for f in fields)
    return "object", id(function)


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

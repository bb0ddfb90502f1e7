"""One program for replicas with values of different shapes.

All devices run the same program, so it holds the replica function once for
each variant of shapes. A device runs the parts of its own variant, and all
devices run each collective together, with operands of the same shapes.
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
from jax import lax
from jax import numpy as jnp
from jax.extend.core import Literal

from keras_dist.errors import ReplicaDivergenceError
from keras_dist.errors import UnsupportedModelError
from keras_dist_jax import jaxprs


class Lockstep:
    """Variants of one program, split at their collectives.

    `programs` has a `ClosedJaxpr` for each variant, with the same number of
    arguments and results.

    Raises:
        ReplicaDivergenceError: If variants differ in their collectives.
        UnsupportedModelError: If one has a collective inside of control flow.
    """

    def __init__(self, programs: Sequence[Any]) -> None:
        self._variants = [_Variant(program) for program in programs]
        kinds = [variant.collectives() for variant in self._variants]
        if any(kind != kinds[0] for kind in kinds):
            raise ReplicaDivergenceError(
                "Replicas with different numbers of rows took different "
                f"paths. Received: collectives {kinds}. Expected: the same "
                "ones, of the same shapes, on each replica. Look for a branch "
                "on shapes, and for collectives of row-shaped values."
            )

    def same_results(self) -> list[bool]:
        """Tells for each result whether all variants compute it alike."""
        keys = [variant.result_keys() for variant in self._variants]
        return [
            all(k == each[0] for k in each) for each in zip(*keys, strict=True)
        ]

    def run(self, variant: Any, arguments: Sequence[Any]) -> list[Any]:
        """Runs on each device the variant that it has.

        `variant` is an integer scalar tensor, different on each device.
        """
        for each in self._variants:
            each.start(arguments)
        count = len(self._variants[0].collective_at)
        for index in range(count):
            self._run_part(variant, index)
            self._meet(variant, index)
        if count and not any(v.calls_back(count) for v in self._variants):
            # The variants' last parts are mostly equal, and the compiler merges
            # them, which it can't do across the branches of a switch.
            for each in self._variants:
                each.run_part(count)
        else:
            self._run_part(variant, count)
        return [
            _select(variant, values)
            for values in self._column(_Variant.results)
        ]

    def _column(self, take: Callable[["_Variant"], list[Any]]) -> Any:
        """Iterates over values, with those of all variants for each."""
        return zip(*[take(each) for each in self._variants], strict=True)

    def _run_part(self, variant: Any, index: int) -> None:
        names = [each.leaving(index) for each in self._variants]
        likes = [[var.aval for var in leaving] for leaving in names]

        def branch(own: int) -> Any:
            def run() -> list[list[Any]]:
                values = self._variants[own].computed(index, names[own])
                return [
                    values
                    if other == own
                    else [jnp.zeros(a.shape, a.dtype) for a in avals]
                    for other, avals in enumerate(likes)
                ]

            return run

        branches = [branch(own) for own in range(len(self._variants))]
        found = lax.switch(variant, branches)
        for each, leaving, values in zip(
            self._variants, names, found, strict=True
        ):
            each.values.update(zip(leaving, values, strict=True))

    def _meet(self, variant: Any, index: int) -> None:
        first = self._variants[0]
        operands = [
            _select(variant, values)
            for values in self._column(lambda v: v.operands(index))
        ]
        equation = first.equations[first.collective_at[index]]
        results = jaxprs.bind(equation, operands)
        for each in self._variants:
            own = each.equations[each.collective_at[index]]
            each.values.update(zip(own.outvars, results, strict=True))


class _Variant:
    """One variant's program, with the values that are computed so far."""

    def __init__(self, program: Any) -> None:
        program = _flat(program)
        self._arguments = list(program.jaxpr.invars)
        self._outvars = list(program.jaxpr.outvars)
        self._consts = dict(
            zip(program.jaxpr.constvars, program.consts, strict=True)
        )
        self.equations = jaxprs.live(program.jaxpr.eqns, self._outvars)
        self.collective_at = [
            index
            for index, equation in enumerate(self.equations)
            if jaxprs.is_collective(equation)
        ]
        self._starts = [0, *[at + 1 for at in self.collective_at]]
        self._stops = [*self.collective_at, len(self.equations)]
        self.values: dict[Any, Any] = {}

    def collectives(self) -> list[str]:
        """Describes the collectives that the variant takes part in."""
        found = []
        for at in self.collective_at:
            equation = self.equations[at]
            shapes = [var.aval.str_short() for var in equation.invars]
            settings = [
                f", {name}={value}"
                for name, value in sorted(equation.params.items())
                if name not in ("axes", "axis_name") and value is not None
            ]
            found.append(
                f"{equation.primitive.name} of {', '.join(shapes)}"
                f"{''.join(settings)}"
            )
        return found

    def start(self, arguments: Sequence[Any]) -> None:
        """Sets the values to the arguments and constants."""
        self.values = dict(self._consts)
        self.values.update(zip(self._arguments, arguments, strict=True))

    def read(self, atom: Any) -> Any:
        """Returns a value that was computed."""
        return atom.val if isinstance(atom, Literal) else self.values[atom]

    def part(self, index: int) -> list[Any]:
        """Returns the equations between a collective and the next one."""
        return self.equations[self._starts[index] : self._stops[index]]

    def calls_back(self, index: int) -> bool:
        """Tells whether a part calls back to Python."""
        return any(map(jaxprs.calls_back, self.part(index)))

    def leaving(self, index: int) -> list[Any]:
        """Returns the variables of a part that later equations need."""
        made = {v: None for e in self.part(index) for v in e.outvars}
        needed = {
            atom
            for equation in self.equations[self._stops[index] :]
            for atom in jaxprs.variables(equation.invars)
        }
        needed.update(jaxprs.variables(self._outvars))
        return [var for var in made if var in needed]

    def computed(self, index: int, leaving: list[Any]) -> list[Any]:
        """Runs a part; returns the values that leave it and keeps none."""
        before = self.values
        self.values = dict(before)
        self.run_part(index)
        values = [self.values[var] for var in leaving]
        self.values = before
        return values

    def run_part(self, index: int) -> None:
        """Runs a part, and keeps all its values."""
        for equation in self.part(index):
            results = jaxprs.bind(equation, [*map(self.read, equation.invars)])
            self.values.update(zip(equation.outvars, results, strict=True))

    def operands(self, index: int) -> list[Any]:
        """Returns the operands of a collective."""
        equation = self.equations[self.collective_at[index]]
        return [self.read(atom) for atom in equation.invars]

    def results(self) -> list[Any]:
        """Returns the results."""
        return [self.read(atom) for atom in self._outvars]

    def result_keys(self) -> list[Any]:
        """Returns a key for each result, equal where it is computed alike."""
        keys: dict[Any, Any] = {
            var: ("argument", i) for i, var in enumerate(self._arguments)
        }
        keys |= {var: constant_key(c) for var, c in self._consts.items()}
        meetings = 0
        for equation in self.equations:
            if jaxprs.is_collective(equation):
                own: Any = ("meeting", meetings)
                meetings += 1
            else:
                own = equation_key(equation, keys)
            for position, var in enumerate(equation.outvars):
                keys[var] = hash((own, position))
        return [atom_key(atom, keys) for atom in self._outvars]


def _select(variant: Any, values: Sequence[Any]) -> Any:
    if all(value is values[0] for value in values):
        return values[0]
    return lax.select_n(variant, *values)


def _flat(program: Any) -> Any:
    """Inlines the functions of a program that have collectives inside."""
    if not any(map(jaxprs.meets_inside, program.jaxpr.eqns)):
        return program
    arguments = [
        jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
        for var in program.jaxpr.invars
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
        "Replicas can't meet inside of control flow in a step in which they "
        "have different numbers of rows. Received: a collective inside of "
        f"`{equation.primitive.name}`. Expected: losses, metrics, updates and "
        "synchronized statistics outside of `cond`, `scan`, `while_loop` and "
        "recurrent cells. Move it out, or drop the partial batch."
    )


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
    """Returns a key of an equation, given those of the variables it takes."""
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

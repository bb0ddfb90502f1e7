"""Walks through programs of JAX, which `jax.make_jaxpr` makes."""

import functools
import operator
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Literal
from jax.extend.core import gensym
from jax.extend.core import jaxpr_as_fun
from jax.extend.core import jaxprs_in_params

from keras_dist.errors import ReplicaDivergenceError
from keras_dist_jax.jax_internals import is_mutable
from keras_dist_jax.jax_internals import is_program
from keras_dist_jax.jax_internals import opened
from keras_dist_jax.jax_internals import scan_sizes
from keras_dist_jax.jax_internals import with_parts

# The axis of the mesh that replicas meet over.
AXIS = "replica"
# Equations that name the axis, without a rendezvous.
_MEET_NOBODY = {"axis_index", "pvary"}
# Parameters with the one program that an equation calls on its own operands.
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_CONTROL_FLOW = {"cond", "scan", "while"}
_CHECKPOINTS = {"checkpoint", "remat", "remat2"}


def inner(equation: Any) -> list[Any]:
    """Returns the programs among an equation's parameters, opened."""
    return [opened(program) for program in jaxprs_in_params(equation.params)]


def called(equation: Any) -> Any:
    """Returns the program that an equation other than control flow calls."""
    if equation.primitive.name in _CONTROL_FLOW:
        return None
    programs = (equation.params.get(key) for key in _CALLS)
    return next((program for program in programs if program is not None), None)


def variables(atoms: Sequence[Any]) -> list[Any]:
    """Returns the atoms that are not literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def taken(equations: Sequence[Any]) -> set[Any]:
    """Returns the variables that equations take."""
    return {v for equation in equations for v in variables(equation.invars)}


def is_collective(equation: Any) -> bool:
    axes = equation.params.get("axes", equation.params.get("axis_name", ()))
    names = axes if isinstance(axes, (tuple, list)) else (axes,)
    return AXIS in names and equation.primitive.name not in _MEET_NOBODY


def meets_inside(equation: object) -> bool:
    """Tells whether the programs of an equation have a collective."""
    return any(
        is_collective(inner_equation) or meets_inside(inner_equation)
        for program in inner(equation)
        for inner_equation in program.eqns
    )


def collectives(program: object) -> list[str]:
    """Describes the collectives of a program, also of those inside of it."""
    descriptions = []
    for equation in opened(program).eqns:
        if is_collective(equation):
            shapes = [operand.aval.str_short() for operand in equation.invars]
            descriptions.append(
                f"{equation.primitive.name} of {' '.join(shapes)}"
            )
        for inner_program in inner(equation):
            descriptions += collectives(inner_program)
    return descriptions


def calls_back(equation: Any) -> bool:
    """Tells whether an equation calls back to Python, which may raise."""
    return "callback" in equation.primitive.name or any(
        map(has_callbacks, inner(equation))
    )


def has_callbacks(program: object) -> bool:
    return any(map(calls_back, opened(program).eqns))


def has_cells_in_derivatives(program: object) -> bool:
    """Tells whether a function with a derivative of its own uses a mutable
    array, which JAX has no rule for."""
    return any(
        (
            equation.primitive.name == "custom_jvp_call"
            and any(map(is_mutable, equation.invars))
        )
        or any(map(has_cells_in_derivatives, inner(equation)))
        for equation in opened(program).eqns
    )


def has_checkpoint(program: object) -> bool:
    """Tells whether a part of a program is computed again for gradients."""
    return any(
        equation.primitive.name in _CHECKPOINTS
        or any(map(has_checkpoint, inner(equation)))
        for equation in opened(program).eqns
    )


def live(equations: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
    """Returns the equations that results need, and those with effects."""
    needed = set(variables(outvars))
    used = []
    for equation in reversed(equations):
        has_effects = equation.effects or calls_back(equation)
        if has_effects or needed.intersection(equation.outvars):
            used.append(equation)
            needed.update(variables(equation.invars))
    return used[::-1]


def value_of(atom: object, values: Mapping[Any, Any]) -> Any:
    """Returns the value of a literal, or of a variable."""
    return atom.val if isinstance(atom, Literal) else values[atom]


def rewritten(
    program: Any,
    change: Callable[[Any], Any] = lambda equation: equation,
    arrange: Callable[[Any], Sequence[Any]] = lambda program: program.eqns,
) -> Any:
    """Replaces each equation of a program, and of those inside of it.

    First, `arrange` chooses the equations of each of these programs. What does
    not change stays the same object, so that JAX compiles it once.
    """
    # By id: each program that was met, and what it became.
    met: dict[int, tuple[Any, Any]] = {}

    def param(value: object) -> Any:
        if is_program(value):
            return whole(value)
        if not isinstance(value, (tuple, list)):
            return value
        if not any(map(is_program, value)):
            return value
        new = [*map(param, value)]
        if all(map(operator.is_, new, value)):
            return value
        make = getattr(type(value), "_make", type(value))  # of named tuples
        return make(new)

    def replaced(equation: Any) -> Any:
        params = {key: param(value) for key, value in equation.params.items()}
        if any(
            params[key] is not value for key, value in equation.params.items()
        ):
            equation = equation.replace(params=params)
        return change(equation)

    def whole(program: object) -> Any:
        if id(program) not in met:
            before = opened(program).eqns
            after = [*map(replaced, arrange(opened(program)))]
            same = len(after) == len(before) and all(
                map(operator.is_, after, before)
            )
            new = program if same else with_parts(program, eqns=after)
            met[id(program)] = program, new
        return met[id(program)][1]

    return whole(program)


def edited(
    fn: Callable[..., Any], *edits: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Makes a function that runs the edited program of another one."""

    def run(*args: Any) -> Any:
        program, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        for edit in edits:
            program = edit(program)
        leaves = jaxpr_as_fun(program)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    run.__name__ = fn.__name__
    return run


@functools.cache
def _empty() -> Any:
    """Returns a program without arguments and equations, as a template."""
    return opened(jax.make_jaxpr(lambda: ())())


def bind(equation: Any, inputs: Sequence[Any]) -> list[Any]:
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


# Collectives with equal results on all replicas; all others give each replica
# something of its own, whatever it brings.
_MAKE_EQUAL = {
    "all_gather",
    "all_gather_invariant",
    "pbroadcast",
    "pbroadcast_dynamic",
    "pmax",
    "pmin",
    "psum",
    "psum_invariant",
    "unreduced_pmax",
    "unreduced_pmin",
    "unreduced_psum",
}
# Equations whose results differ even where their operands are equal: each
# device calls Python, or its generator, for itself.
_OF_EACH = {"axis_index", "io_callback", "rng_uniform"}
# Equations that write to a mutable array, their first operand.
_WRITES = {"swap", "addupdate"}


def differing(
    program: object, arguments: Sequence[bool], constants: Sequence[bool] = ()
) -> tuple[list[bool], list[bool]]:
    """Tells for each output whether it may differ between replicas, and for
    each argument whether it may do so in the end: it can be a mutable array.

    Mutable arrays among `constants` are told of behind the arguments.
    """
    jaxpr = opened(program)
    taken = list(jaxpr.invars)
    if constants:
        taken += jaxpr.constvars
    different = {
        variable
        for variable, may_differ in zip(
            taken, [*arguments, *constants], strict=True
        )
        if may_differ
    }

    def differs(atom: object) -> bool:
        return not isinstance(atom, Literal) and atom in different

    for equation in jaxpr.eqns:
        inputs = [*map(differs, equation.invars)]
        outputs, after = _of_equation(equation, inputs)
        pairs = zip(equation.outvars, outputs, strict=True)
        different.update(var for var, may_differ in pairs if may_differ)
        for atom, may_differ in zip(equation.invars, after, strict=True):
            if is_mutable(atom):
                (different.add if may_differ else different.discard)(atom)
    return [*map(differs, jaxpr.outvars)], [*map(differs, taken)]


def _of_equation(
    equation: Any, inputs: list[bool]
) -> tuple[list[bool], list[bool]]:
    name, params = equation.primitive.name, equation.params
    outputs = len(equation.outvars)
    if is_collective(equation) and not _makes_differ(equation):
        return [False] * outputs, inputs
    if _makes_differ(equation):
        return [True] * outputs, inputs
    if name == "get":
        return [any(inputs)] * outputs, inputs
    if name in _WRITES:
        # The old value, and the new one, whose places are the last operands.
        old, *new = inputs
        is_all = name == "swap" and equation.invars[0].aval.shape == getattr(
            equation.invars[1].aval, "shape", None
        )
        return [old] * outputs, [any(new) or (old and not is_all), *new]
    if name == "cond":
        return _of_cond(equation, inputs)
    if name == "scan":
        return _of_scan(params, inputs)
    if name == "while":
        return _of_while(equation, inputs)
    program = called(equation)
    if program is not None and len(opened(program).invars) == len(inputs):
        return differing(program, inputs)
    may_differ = any(inputs) or any(map(_has_its_own, inner(equation)))
    return [may_differ] * outputs, [may_differ] * len(inputs)


def _of_cond(
    equation: Any, inputs: list[bool]
) -> tuple[list[bool], list[bool]]:
    index_differs, *rest = inputs
    if index_differs and meets_inside(equation):
        raise _met_by_some("a branch that only some replicas take")
    branches = equation.params["branches"]
    outputs, after = zip(*[differing(b, rest) for b in branches], strict=True)
    written = {v for b in branches for v in _places_written(opened(b))}
    return (
        [index_differs or any(flags) for flags in zip(*outputs, strict=True)],
        [
            index_differs,
            *(
                any(flags) or (index_differs and place in written)
                for place, flags in enumerate(zip(*after, strict=True))
            ),
        ],
    )


def written_by(jaxpr: Any) -> set[Any]:
    """Returns the variables of a program, mutable arrays, that it writes to."""
    written = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name in _WRITES:
            written.add(equation.invars[0])
        # Else mutable arrays inside of it are its own, as those of a kernel.
        takes = any(map(is_mutable, equation.invars))
        for program in inner(equation) if takes else ():
            # What an equation tests, or stops a loop with, comes first.
            operands = equation.invars[-len(program.invars) :]
            written |= {operands[place] for place in _places_written(program)}
    return written


def _places_written(jaxpr: Any) -> set[int]:
    written = written_by(jaxpr)
    return {p for p, variable in enumerate(jaxpr.invars) if variable in written}


def _of_scan(params: Any, inputs: list[bool]) -> tuple[list[bool], list[bool]]:
    consts, carries = scan_sizes(params)
    before = inputs
    while True:
        outputs, mutable = differing(params["jaxpr"], inputs)
        after = [a or b for a, b in zip(inputs, mutable, strict=True)]
        carry = slice(consts, consts + carries)
        after[carry] = [
            a or b for a, b in zip(inputs[carry], outputs, strict=False)
        ]
        if after == inputs:
            # If the loop runs no step, carried values come out as they went in.
            if not params["length"]:
                return [*before[carry], *outputs[carries:]], before
            return outputs, after
        inputs = after


def _of_while(
    equation: Any, inputs: list[bool]
) -> tuple[list[bool], list[bool]]:
    params = equation.params
    of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
    first = of_cond + of_body
    while True:
        fixed, carry = inputs[of_cond:first], inputs[first:]
        outputs, in_body = differing(params["body_jaxpr"], [*fixed, *carry])
        (stops,), in_cond = differing(
            params["cond_jaxpr"], [*inputs[:of_cond], *carry]
        )
        written = _places_written(opened(params["body_jaxpr"]))
        after = [
            a or b or (stops and place in written)
            for place, (a, b) in enumerate(
                zip(fixed, in_body[:of_body], strict=True)
            )
        ]
        carried = [a or b or stops for a, b in zip(carry, outputs, strict=True)]
        after = [
            *map(operator.or_, inputs[:of_cond], in_cond),
            *after,
            *carried,
        ]
        if after == inputs:
            if stops and meets_inside(equation):
                raise _met_by_some("a loop that some replicas leave sooner")
            return carried, after
        inputs = after


def _met_by_some(where: str) -> ReplicaDivergenceError:
    return ReplicaDivergenceError(
        f"Replicas can't wait for each other in {where}: they would wait "
        "forever.\nReceived: a collective, an update or an assignment inside "
        "of control flow that depends on each replica's own data. Expected: "
        "calls that all replicas reach. Make the call first, then choose "
        "between values with `keras.ops.where`."
    )


def _makes_differ(equation: Any) -> bool:
    """Tells whether results differ, whatever the operands are."""
    name, groups = equation.primitive.name, "axis_index_groups"
    if not is_collective(equation):
        return name in _OF_EACH
    # Each group of replicas has its own result.
    return name not in _MAKE_EQUAL or len(equation.params.get(groups) or ()) > 1


def _has_its_own(jaxpr: Any) -> bool:
    return any(
        _makes_differ(equation) or any(map(_has_its_own, inner(equation)))
        for equation in jaxpr.eqns
    )

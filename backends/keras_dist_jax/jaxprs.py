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
from keras_dist_jax.jax_internals import is_program
from keras_dist_jax.jax_internals import opened
from keras_dist_jax.jax_internals import scan_sizes
from keras_dist_jax.jax_internals import with_parts

# The axis of the mesh that replicas meet over.
AXIS = "replica"
# Equations that name the axis, without a meeting.
_MEET_NOBODY = {"axis_index", "pvary"}
# Parameters with the one program that an equation calls on its own operands.
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_CONTROL_FLOW = {"cond", "scan", "while"}
_CHECKPOINTS = {"checkpoint", "remat", "remat2"}


def inner(equation: Any) -> list[Any]:
    """Returns the programs among an equation's parameters, opened."""
    return [opened(each) for each in jaxprs_in_params(equation.params)]


def called(equation: Any) -> Any:
    """Returns the program that an equation other than control flow calls."""
    if equation.primitive.name in _CONTROL_FLOW:
        return None
    found = (equation.params.get(key) for key in _CALLS)
    return next((program for program in found if program is not None), None)


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


def meets_inside(equation: Any) -> bool:
    """Tells whether the programs of an equation have a collective."""
    return any(
        is_collective(each) or meets_inside(each)
        for program in inner(equation)
        for each in program.eqns
    )


def collectives(program: Any) -> list[str]:
    """Describes the collectives of a program, also of those inside of it."""
    found = []
    for equation in opened(program).eqns:
        if is_collective(equation):
            shapes = [each.aval.str_short() for each in equation.invars]
            found.append(f"{equation.primitive.name} of {' '.join(shapes)}")
        for each in inner(equation):
            found += collectives(each)
    return found


def calls_back(equation: Any) -> bool:
    """Tells whether an equation calls back to Python, which may raise."""
    return "callback" in equation.primitive.name or any(
        map(has_callbacks, inner(equation))
    )


def has_callbacks(program: Any) -> bool:
    return any(map(calls_back, opened(program).eqns))


def has_checkpoint(program: Any) -> bool:
    """Tells whether a part of a program is computed again for gradients."""
    return any(
        equation.primitive.name in _CHECKPOINTS
        or any(map(has_checkpoint, inner(equation)))
        for equation in opened(program).eqns
    )


def live(equations: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
    """Returns the equations that results need, and those with effects."""
    needed = set(variables(outvars))
    found = []
    for equation in reversed(equations):
        has_effects = equation.effects or calls_back(equation)
        if has_effects or needed.intersection(equation.outvars):
            found.append(equation)
            needed.update(variables(equation.invars))
    return found[::-1]


def value_of(atom: Any, values: Mapping[Any, Any]) -> Any:
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

    def param(value: Any) -> Any:
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
        params = {key: param(each) for key, each in equation.params.items()}
        if any(
            params[key] is not each for key, each in equation.params.items()
        ):
            equation = equation.replace(params=params)
        return change(equation)

    def whole(program: Any) -> Any:
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


def differing(program: Any, arguments: Sequence[bool]) -> list[bool]:
    """Tells for each output whether it may differ between replicas."""
    found = differing_in(program, arguments)
    return [
        not isinstance(atom, Literal) and atom in found
        for atom in opened(program).outvars
    ]


def differing_in(program: Any, arguments: Sequence[bool]) -> set[Any]:
    """Returns the values in a program that may differ between replicas."""
    jaxpr = opened(program)
    found = {v for v, own in zip(jaxpr.invars, arguments, strict=True) if own}
    for equation in jaxpr.eqns:
        inputs = [
            not isinstance(atom, Literal) and atom in found
            for atom in equation.invars
        ]
        outputs = _of_equation(equation, inputs)
        pairs = zip(equation.outvars, outputs, strict=True)
        found.update(var for var, own in pairs if own)
    return found


def _of_equation(equation: Any, inputs: list[bool]) -> list[bool]:
    name, params = equation.primitive.name, equation.params
    outputs = len(equation.outvars)
    if is_collective(equation) and not _makes_differ(equation):
        return [False] * outputs
    if _makes_differ(equation):
        return [True] * outputs
    if name == "cond":
        if inputs[0] and meets_inside(equation):
            raise _meeting_of_some("a branch that only some replicas take")
        branches = [differing(b, inputs[1:]) for b in params["branches"]]
        either = [any(each) for each in zip(*branches, strict=True)]
        return [inputs[0] or own for own in either]
    if name == "scan":
        return _of_scan(params, inputs)
    if name == "while":
        return _of_while(equation, inputs)
    program = called(equation)
    if program is not None and len(opened(program).invars) == len(inputs):
        return differing(program, inputs)
    own = any(inputs) or any(map(_has_its_own, inner(equation)))
    return [own] * outputs


def _of_scan(params: Any, inputs: list[bool]) -> list[bool]:
    consts, carries = scan_sizes(params)
    fixed, before = inputs[:consts], inputs[consts : consts + carries]
    carry, rows = before, inputs[consts + carries :]
    while True:
        outputs = differing(params["jaxpr"], [*fixed, *carry, *rows])
        after = [a or b for a, b in zip(carry, outputs, strict=False)]
        if after == carry:
            # If the loop runs no step, carried values come out as they went in.
            if not params["length"]:
                return [*before, *outputs[carries:]]
            return outputs
        carry = after


def _of_while(equation: Any, inputs: list[bool]) -> list[bool]:
    params = equation.params
    of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
    cond_fixed = inputs[:of_cond]
    fixed = inputs[of_cond : of_cond + of_body]
    carry = inputs[of_cond + of_body :]
    while True:
        outputs = differing(params["body_jaxpr"], [*fixed, *carry])
        stops = differing(params["cond_jaxpr"], [*cond_fixed, *carry])[0]
        after = [a or b or stops for a, b in zip(carry, outputs, strict=True)]
        if after == carry:
            if stops and meets_inside(equation):
                raise _meeting_of_some("a loop that some replicas leave sooner")
            return after
        carry = after


def _meeting_of_some(where: str) -> ReplicaDivergenceError:
    return ReplicaDivergenceError(
        f"Replicas can't wait for each other in {where}: they would wait "
        "forever. Received: a collective, an update or an assignment inside "
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

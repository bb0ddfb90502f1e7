"""Analysis of programs for results that may differ between replicas.

The values that each replica has of its own are followed through the program
to its results. Collectives make values equal again.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from keras_dist.errors import ReplicaDivergenceError
from keras_dist_jax.jaxprs import called
from keras_dist_jax.jaxprs import inner
from keras_dist_jax.jaxprs import is_collective
from keras_dist_jax.jaxprs import meets_inside
from keras_dist_jax.jaxprs import opened

# Collectives with equal results on all replicas; all others give each replica
# something of its own, whatever it brings.
_MAKE_EQUAL = {
    "all_gather",
    "all_gather_invariant",
    "pbroadcast",
    "pmax",
    "pmin",
    "psum",
    "psum_invariant",
}
# Equations whose results differ even where their operands are equal: each
# device calls Python, or its generator, for itself.
_OF_EACH = {"axis_index", "io_callback", "rng_uniform"}


def differing(jaxpr: Any, arguments: Sequence[bool]) -> list[bool]:
    """Tells for each output whether it may differ between replicas.

    `arguments` tells the same for each argument.
    """
    differs: set[Any] = set()
    for var, own in zip(jaxpr.invars, arguments, strict=True):
        if own:
            differs.add(var)

    def may_differ(atom: Any) -> bool:
        return not isinstance(atom, Literal) and atom in differs

    for equation in jaxpr.eqns:
        inputs = [may_differ(atom) for atom in equation.invars]
        outputs = _of_equation(equation, inputs)
        differs.update(
            var
            for var, own in zip(equation.outvars, outputs, strict=True)
            if own
        )
    return [may_differ(atom) for atom in jaxpr.outvars]


def _of_equation(equation: Any, inputs: list[bool]) -> list[bool]:
    name, params = equation.primitive.name, equation.params
    outputs = len(equation.outvars)
    if is_collective(equation) and not _makes_differ(equation):
        return [False] * outputs
    if _makes_differ(equation):
        return [True] * outputs
    if name == "cond":
        if inputs[0] and meets_inside(equation):
            raise _meeting_of_some("a branch that only some of them take")
        branches = [_inside(b, inputs[1:]) for b in params["branches"]]
        either = [any(each) for each in zip(*branches, strict=True)]
        return [inputs[0] or own for own in either]
    if name == "scan":
        return _of_scan(params, inputs)
    if name == "while":
        return _of_while(equation, inputs)
    program = called(equation)
    if program is not None and len(opened(program).invars) == len(inputs):
        return _inside(program, inputs)
    own = any(inputs) or any(map(_has_its_own, inner(equation)))
    return [own] * outputs


def _of_scan(params: Any, inputs: list[bool]) -> list[bool]:
    consts, carries = params["num_consts"], params["num_carry"]
    fixed, before = inputs[:consts], inputs[consts : consts + carries]
    carry, rows = before, inputs[consts + carries :]
    while True:
        outputs = _inside(params["jaxpr"], [*fixed, *carry, *rows])
        after = [a or b for a, b in zip(carry, outputs, strict=False)]
        if after == carry:
            # Without a step, what is carried comes out as it went in.
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
        outputs = _inside(params["body_jaxpr"], [*fixed, *carry])
        stops = _inside(params["cond_jaxpr"], [*cond_fixed, *carry])[0]
        after = [a or b or stops for a, b in zip(carry, outputs, strict=True)]
        if after == carry:
            if stops and meets_inside(equation):
                raise _meeting_of_some("a loop that some of them leave sooner")
            return after
        carry = after


def _meeting_of_some(where: str) -> ReplicaDivergenceError:
    return ReplicaDivergenceError(
        f"Replicas meet in {where}: the others would never come. Received: a "
        "collective, an update or an assignment inside of control flow that "
        "depends on what each replica has of its own. Expected: meetings that "
        "all replicas come to. Meet first, then choose with `keras.ops.where`."
    )


def _makes_differ(equation: Any) -> bool:
    """Tells whether results differ, whatever the operands are."""
    name, groups = equation.primitive.name, "axis_index_groups"
    if not is_collective(equation):
        return name in _OF_EACH
    # Each group of replicas has a result of its own.
    return name not in _MAKE_EQUAL or len(equation.params.get(groups) or ()) > 1


def _inside(program: Any, inputs: list[bool]) -> list[bool]:
    return differing(opened(program), inputs)


def _has_its_own(jaxpr: Any) -> bool:
    return any(
        _makes_differ(equation) or any(map(_has_its_own, inner(equation)))
        for equation in jaxpr.eqns
    )

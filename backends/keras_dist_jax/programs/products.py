"""Products whose transposition a compiler for CPUs would leave until too late.

The gradient of `kernel` in `x @ kernel` is a transposed product in JAX. XLA
sums the product over the devices before it transposes it, and each value that
an optimizer then computes from the sum reads it across its rows. The product
of the swapped operands needs no transposition. On one device, XLA swaps them
itself, so that the bits are the same there. In tests/backends/jax,
`late_transposition.py` is the report to JAX, and `test_products.py` tells when
JAX swaps them here too.
"""

import collections
import itertools
from collections.abc import Sequence
from typing import Any

from jax import lax

from keras_dist_jax.programs.jaxprs import rewritten
from keras_dist_jax.programs.jaxprs import variables

# Bytes of a float32.
_WIDE = 4


def untransposed(program: object) -> Any:
    """Swaps the operands of products that are only used transposed."""
    return rewritten(program, arrange=_arranged)


def _arranged(program: Any) -> list[Any]:
    """Returns a program's own equations, with operands swapped."""
    used = [equation.invars for equation in program.eqns]
    uses = collections.Counter(
        variables([*itertools.chain(*used), *program.outvars])
    )
    transpositions = {
        source: equation
        for equation in program.eqns
        if equation.primitive.name == "transpose"
        for source in variables(equation.invars)
        if uses[source] == 1
    }
    arranged: list[Any] = []
    done: set[Any] = set()
    for equation in program.eqns:
        if not done.isdisjoint(equation.outvars):
            continue
        # What was transposed twice is as it was, as in a product with a
        # transposed kernel.
        while _is_product(equation):
            after = transpositions.get(equation.outvars[0])
            if after is None or not _exchanges(after, equation):
                break
            done.add(after.outvars[0])
            equation = _swapped(equation, after.outvars)
        arranged.append(equation)
    return arranged


def _is_product(equation: Any) -> bool:
    """Tells whether an equation is a product whose operands may be swapped."""
    if equation.primitive.name != "dot_general":
        return False
    sharding = equation.params.get("out_sharding")
    return (
        (sharding is None or not any(sharding.spec))
        # It may say something about each operand.
        and not isinstance(equation.params["precision"], lax.DotAlgorithm)
        # XLA would leave out the rounding of a narrow result that is made wide.
        and equation.outvars[0].aval.dtype.itemsize >= _WIDE
    )


def _exchanges(transposition: Any, product: Any) -> bool:
    """Tells whether one operand's axes and the other's change places."""
    (of_left, of_right), (batch, _) = product.params["dimension_numbers"]
    left, right = (operand.aval.ndim for operand in product.invars)
    start = len(batch)
    middle = left - len(of_left)
    end = middle + right - len(of_right) - start
    permutation = *range(start), *range(middle, end), *range(start, middle)
    return tuple(transposition.params["permutation"]) == permutation


def _swapped(product: Any, outvars: Sequence[Any]) -> Any:
    contracted, batch = product.params["dimension_numbers"]
    params = {
        **product.params,
        "dimension_numbers": (contracted[::-1], batch[::-1]),
    }
    if isinstance(params["precision"], tuple):
        params["precision"] = params["precision"][::-1]
    return product.replace(
        invars=product.invars[::-1], outvars=outvars, params=params
    )

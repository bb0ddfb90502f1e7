"""Mutable arrays that stand for variables while a function is traced.

JAX gives a mutable array that a function uses to the program as a constant. So
one trace tells which variables a function reads and assigns, also inside of
branches, loops and `jax.checkpoint`. While it is traced, a cell has no memory.
When the program runs, an array of the program takes its place.
"""

import weakref
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax
import keras
from jax import lax
from jax import numpy as jnp

from keras_dist_jax import keras_internals as internals
from keras_dist_jax.jax_internals import around_maps
from keras_dist_jax.jax_internals import opened
from keras_dist_jax.programs import jaxprs

# What gradients and `jax.checkpoint` make of assignments: nothing.
_KIND = "no_grad_no_remat"
# Each variable's cells, as long as programs have them.
_cells: weakref.WeakValueDictionary[Any, jax.Ref] = (
    weakref.WeakValueDictionary()
)


def cell_of(
    variable: keras.Variable, role: str, shape: Sequence[int]
) -> jax.Ref:
    """Returns a variable's cell for a role, which has a shape of its own."""
    dtype = jax.dtypes.canonicalize_dtype(internals.dtype_of(variable))
    aval = jax.core.ShapedArray(tuple(shape), dtype)
    key = id(variable), role, aval
    cell = _cells.get(key)
    if cell is None or cell.variable() is not variable:
        cell = jax.Ref(jax.ref.AbstractRef(aval, kind=_KIND), None)
        cell.variable, cell.role = weakref.ref(variable), role
        _cells[key] = cell
    return cell


def read(cell: jax.Ref) -> Any:
    """Returns what a cell has."""
    # JAX has no rules for cells in mapped branches and loops.
    with around_maps():
        return cell[...]


def write(cell: jax.Ref, value: object) -> None:
    """Replaces what a cell has."""
    # Other dtypes would need traces of their own.
    value = lax.convert_element_type(jnp.asarray(value), cell.dtype)
    with around_maps(value):
        cell[...] = value


class Cells(NamedTuple):
    """The variables whose cells of one role a program uses, by id."""

    used: dict[int, keras.Variable]
    written: dict[int, keras.Variable]


def place_of(constant: object) -> tuple[str, int]:
    """Returns the role of a cell and the id of its variable; no role for what
    is no cell."""
    if isinstance(constant, jax.Ref) and hasattr(constant, "role"):
        return constant.role, id(constant.variable())
    return "", id(constant)


def cells_in(program: Any, role: str) -> Cells:
    """Returns what a program reads and writes through cells of a role."""
    written = jaxprs.written_by(opened(program))
    cells = [
        (constant.variable(), variable in written)
        for constant, variable in zip(
            program.consts, opened(program).constvars, strict=True
        )
        if place_of(constant)[0] == role
    ]
    return Cells(
        {id(variable): variable for variable, _ in cells},
        {id(variable): variable for variable, is_new in cells if is_new},
    )


def run(
    program: Any,
    arguments: Sequence[Any],
    values: Mapping[str, Mapping[int, Any]],
) -> tuple[list[Any], dict[str, dict[int, Any]]]:
    """Runs a program in which variables begin with values, by role and id.

    Returns its results, and the variables' last values.
    """
    live = {
        role: {
            key: jax.new_ref(value, kind=_KIND) for key, value in by_id.items()
        }
        for role, by_id in values.items()
    }
    constants = []
    for constant in program.consts:
        role, key = place_of(constant)
        constants.append(live[role][key] if role else constant)
    results = jax.core.eval_jaxpr(opened(program), constants, *arguments)
    return results, {
        role: {key: ref[...] for key, ref in by_id.items()}
        for role, by_id in live.items()
    }

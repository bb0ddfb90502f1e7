"""Scatters of steps whose rows are in unequal shares, on a mesh of two axes.

XLA's partitioner gives an unequal share zeros as its last indices, and, where
an axis of the mesh has copies, forgets to ignore what they scatter: row 0 of an
embedding would get a gradient of a row that does not exist. So such a scatter
gets all rows on each device.
"""

from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from keras_dist_jax.jaxprs import bind
from keras_dist_jax.jaxprs import rewritten

_ANY = PartitionSpec.UNCONSTRAINED


def with_whole_rows(program: Any, mesh: Mesh) -> Any:
    """Makes the scatters of a step take all of their rows on each device."""

    def whole(array: Any, spec: Any) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.lax.with_sharding_constraint(array, sharding)

    def change(equation: Any) -> Any:
        if not equation.primitive.name.startswith("scatter"):
            return equation

        window = equation.params["dimension_numbers"].update_window_dims

        def call(operand: Any, indices: Any, updates: Any) -> list[Any]:
            # What is not along rows may be divided.
            axes = [_ANY if i in window else None for i in range(updates.ndim)]
            given = operand, whole(indices, ()), whole(updates, axes)
            return bind(equation, given)

        described = [
            jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)
            for atom in equation.invars
        ]
        (called,) = jax.make_jaxpr(jax.jit(call))(*described).eqns
        return called.replace(invars=equation.invars, outvars=equation.outvars)

    return rewritten(program, change)

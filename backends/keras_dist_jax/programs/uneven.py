"""Operations of steps whose rows are in unequal shares, on a mesh.

XLA's partitioner gives an unequal share zeros as its last rows and indices. Of
some operations along the rows it forgets to ignore what they add, or ends the
process: scatters into each of several columns, as in the gradient of a sort,
and the gradient of a window's maximum. If the mesh has two axes, so it is with
all scatters and convolutions. Each device gets all rows that these go along.
"""

from collections.abc import Collection
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from keras_dist_jax.programs.jaxprs import bind
from keras_dist_jax.programs.jaxprs import rewritten

_ANY = PartitionSpec.UNCONSTRAINED


def with_whole_rows(program: Any, mesh: Mesh) -> Any:
    """Makes scatters and windows of a step take all of their rows."""

    def change(equation: Any) -> Any:
        divided = _divided(equation, len(mesh.shape) > 1)
        if divided is None:
            return equation

        def whole(array: jax.Array, axes: Collection[int]) -> Any:
            if len(axes) == array.ndim:
                return array
            spec = [_ANY if i in axes else None for i in range(array.ndim)]
            sharding = NamedSharding(mesh, PartitionSpec(*spec))
            return jax.lax.with_sharding_constraint(array, sharding)

        def call(*operands: Any) -> list[Any]:
            results = bind(equation, [*map(whole, operands, divided.operands)])
            return [*map(whole, results, divided.results)]

        described = [
            jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)
            for atom in equation.invars
        ]
        (called,) = jax.make_jaxpr(jax.jit(call))(*described).eqns
        return called.replace(invars=equation.invars, outvars=equation.outvars)

    return rewritten(program, change)


class _Divided(NamedTuple):
    """The axes of an operation's arrays that devices may divide."""

    operands: Sequence[Collection[int]]
    results: Sequence[Collection[int]]


def _divided(equation: Any, has_two_axes: bool) -> _Divided | None:
    """Returns what devices may divide; `None` if that is everything."""
    name, params = equation.primitive.name, equation.params
    if name.startswith("scatter"):
        numbers = params["dimension_numbers"]
        if not has_two_axes and not numbers.operand_batching_dims:
            return None
        every = range(equation.invars[0].aval.ndim)
        return _Divided([every, (), numbers.update_window_dims], [every])
    if name == "conv_general_dilated" and has_two_axes:
        numbers = params["dimension_numbers"]
        # In front of the axes that windows go along.
        axes = [spec[:2] for spec in numbers]
        return _Divided(axes[:2], axes[2:])
    if "window_dimensions" in params:
        sizes = enumerate(params["window_dimensions"])
        alone = [axis for axis, size in sizes if size == 1]
        return _Divided(
            [alone] * len(equation.invars), [alone] * len(equation.outvars)
        )
    return None

"""The work of a traced program, counted in its matrix products."""

import math
from typing import Any

from keras_dist_jax.jax_internals import manual_axes
from keras_dist_jax.jax_internals import opened
from keras_dist_jax.programs.jaxprs import inner


def flops_of(program: object, devices: int) -> int:
    """Returns the floating-point operations of a device, on average.

    A loop counts as often as it runs, if that is known, and of branches the
    one with the most work.
    """
    return _total(opened(program)) // devices


def _total(jaxpr: Any) -> int:
    return sum(map(_of_equation, jaxpr.eqns))


def _of_equation(equation: Any) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        length = math.prod(int(left[axis]) for axis in contracted)
        return 2 * length * _size_of(equation.outvars[0])
    if name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        kernel = equation.invars[1].aval.shape
        # Each result is a sum over the kernel, but for its output channels.
        length = _size_of(equation.invars[1]) // int(
            kernel[numbers.rhs_spec[0]]
        )
        # A transposed convolution has zeros between its inputs.
        zeros = math.prod(map(int, params["lhs_dilation"]))
        return 2 * length * _size_of(equation.outvars[0]) // zeros
    parts = [_total(program) for program in inner(equation)]
    if name == "cond":
        return max(parts, default=0)
    times = params["length"] if name == "scan" else 1
    if name == "shard_map":  # the program of one device, or of one replica
        sizes = params["mesh"].shape
        times = math.prod(sizes[axis] for axis in manual_axes(params))
    return times * sum(parts)


def _size_of(atom: Any) -> int:
    return math.prod(map(int, atom.aval.shape))

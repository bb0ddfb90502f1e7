"""Explanations of JAX's errors about code that it can't trace."""

from typing import NoReturn

import jax

from keras_dist.errors import TraceError

_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


def raise_explained(error: BaseException, name: str) -> NoReturn:
    """Raises a `TraceError` for one of JAX's errors, or the error itself.

    `name` is that of the compiled function.
    """
    received = (str(error).splitlines() or [""])[0]
    if isinstance(error, _NEEDS_VALUES) or (
        type(error) is TypeError and "of concrete values" in received
    ):
        raise TraceError(
            f"The compiled function '{name}' needs the value of a tensor while "
            "it is traced: for an `if` or `while`, `float()`, `int()`, "
            f"`convert_to_numpy`, or for a shape. Received: {received} "
            "Expected: operations on tensors. Use `keras.ops.where`, "
            "`keras.ops.cond` or `keras.ops.while_loop`, fixed shapes with a "
            "mask, or take that part out of `keras_dist.function`."
        ) from error
    if isinstance(error, jax.errors.UnexpectedTracerError):
        raise TraceError(
            f"The compiled function '{name}' uses a tensor that belongs to "
            "another trace: Python kept it, in a list, a global or an "
            "attribute, and it has no value outside of the trace. Received: "
            f"{received} Expected: tensors that are returned, or kept in a "
            "`keras.Variable` with `assign`."
        ) from error
    raise error

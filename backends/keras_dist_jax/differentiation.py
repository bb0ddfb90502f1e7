"""Gradients of functions of variables, by way of functions of arrays."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_dist.errors import TraceError
from keras_dist.internals.keras_internals import stateless_scope
from keras_dist.plugin.front_end import keras_hooks
from keras_dist.replica.differentiation import Differentiated
from keras_dist.replica.scopes import Recording
from keras_dist.replica.scopes import replay
from keras_dist.replica.scopes import value_in
from keras_dist_jax.control_flow import install_cond


def differentiate(
    fn: Callable[..., tuple[Any, Any]],
    variables: Sequence[keras.Variable],
    tensors: Sequence[Any],
) -> Differentiated:
    """See `Differentiates.differentiate`.

    JAX differentiates functions of arrays. So `fn` reads variables from an
    overlay, and the values that it assigns leave as results, to be assigned
    once JAX is done.
    """
    hooks = keras_hooks()
    hooks.install_for_functions()
    install_cond()
    kept: list[Any] = []

    def of_values(values: list[Any], tensors: list[Any]) -> tuple[Any, Any]:
        mapping = zip(variables, values, strict=True)
        overlay = Recording(mapping, jax.ensure_compile_time_eval)
        try:
            with overlay:
                value, aux = fn(*tensors)
            written = overlay.written
            kept[:] = overlay.was_read, [variable for variable, _ in written]
        finally:
            overlay.release()
        return jnp.asarray(value), (aux, [new for _, new in written])

    below = stateless_scope()
    values = [_value(below, variable) for variable in variables]
    with hooks.creating():
        (value, (aux, written)), (by_variable, by_tensor) = jax.value_and_grad(
            of_values, argnums=(0, 1), has_aux=True
        )(values, list(tensors))
    was_read, assigned = kept
    _check_written(assigned, written)
    replay(zip(assigned, written, strict=True))
    gradients = [
        gradient if id(variable) in was_read else None
        for variable, gradient in zip(variables, by_variable, strict=True)
    ]
    return value, aux, gradients + by_tensor


def _check_written(
    variables: Sequence[keras.Variable], values: Sequence[Any]
) -> None:
    """Checks that assigned values can leave the trace that made them.

    Raises:
        TraceError: If one was assigned inside of an inner transformation.
    """
    for variable, value in zip(variables, values, strict=True):
        if not isinstance(value, jax.core.Tracer):
            continue
        try:
            jnp.copy(value)
        except jax.errors.UnexpectedTracerError as error:
            raise TraceError(
                f"Variable '{variable.path}' was assigned in a function that "
                "`jax.jit`, `jax.checkpoint`, `keras.RematScope` or a loop of "
                "JAX traces, inside of one that is differentiated. JAX lets "
                f"no value out of there but as a result. Received: {value!r}. "
                "Expected: assignments outside of it. Return the value, and "
                "assign it in the function that is differentiated."
            ) from error


def _value(below: Any, variable: keras.Variable) -> Any:
    value = value_in(below, variable)
    if value is None:
        raise ValueError(
            f"Variable '{variable.path}' has no value yet. Received: a "
            "variable that was made in a `keras.StatelessScope`, or while a "
            "step of `fit` was traced that does not get it as part of its "
            "state. Expected: variables that exist. Build the model before."
        )
    return value

"""Branches, seeds and gradients of Keras in compiled functions."""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import jax
import jax.numpy as jnp
import keras
from jax import lax

from keras_dist.errors import TraceError
from keras_dist.plugins import HOOKS
from keras_dist.plugins import Differentiated
from keras_dist.plugins import LayerScope
from keras_dist.plugins import Overlay
from keras_dist.plugins import Replica
from keras_dist.plugins import as_hook
from keras_dist.plugins import base_scope
from keras_dist.plugins import in_replica_function
from keras_dist.plugins import stateless_scope
from keras_dist.plugins import value_in
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.functions.tracing import current_trace
from keras_dist_jax.jax_internals import tracing_anew
from keras_dist_jax.placement.arrays import eagerly

Branch = Callable[[], Any]
_Summing = TypeVar("_Summing", bound=Replica)


def hook_global_seed(original: Callable[[], Any]) -> Callable[[], Any]:
    """Wraps the function that gives `keras.random` the global seeds.

    Keras refuses draws without a seed under any trace of JAX, where the seed
    would be lost.
    """

    @functools.wraps(original)
    def global_seed_generator() -> Any:
        made = None if current_trace() is None else internals.global_seed()
        return original() if made is None else made

    return global_seed_generator


@as_hook
def hook_cond(
    original: Callable[..., Any],
    pred: object,
    true_fn: Branch,
    false_fn: Branch,
) -> Any:
    """Stands for the function that `keras.ops.cond` calls.

    Outside of programs, JAX would trace both branches, and no value that one
    assigns could leave it. So the one that counts is called.
    """
    if current_trace() is not None or not _is_differentiated():
        return original(pred, true_fn, false_fn)
    known = lax.stop_gradient(pred)
    if isinstance(known, jax.core.Tracer):
        return original(pred, true_fn, false_fn)
    return true_fn() if known else false_fn()


@as_hook
def hook_loss_scaling(
    original: Any, self: Any, grads: Any, trainable_variables: Any = None
) -> None:
    """Stands for what an optimizer that scales losses does to variables.

    On JAX, Keras' own can't be applied outside of its trainer.
    """
    trained, state = self._trainable_variables, self.variables
    is_ours = any(
        "distribute_strategy" in vars(variable) for variable in trained[:1]
    )
    is_ours = is_ours or in_replica_function() or _is_differentiated()
    if not is_ours and current_trace() is None:
        original(self, grads, trainable_variables)
        return
    if trainable_variables is not None:
        given = dict(zip(map(id, trainable_variables), grads, strict=True))
        grads = [given.get(id(variable)) for variable in trained]
    results = self.stateless_apply(
        [variable.value for variable in state],
        list(grads),
        [variable.value for variable in trained],
    )
    for variables, values in zip((trained, state), results, strict=True):
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


def differentiate(
    fn: Callable[..., tuple[Any, Any]],
    variables: Sequence[keras.Variable],
    tensors: Sequence[Any],
) -> Differentiated:
    """See `Differentiates.differentiate`."""
    # JAX differentiates functions of arrays: of the variables' values.
    kept: list[_Differentiated] = []

    def of_values(values: list[Any], tensors: list[Any]) -> tuple[Any, Any]:
        scope = _Differentiated(variables, values, are_sharded)
        kept.append(scope)
        is_traced = current_trace() is not None
        # Else single operations would be compiled anew, too.
        with tracing_anew() if is_traced else contextlib.nullcontext(), scope:
            value, aux = fn(*tensors)
        scope.check()
        return jnp.asarray(value), aux

    below = stateless_scope()
    are_sharded = [*map(_is_sharded, variables)]
    values = [
        jnp.zeros(variable.shape, internals.dtype_of(variable))
        if sharded
        else _value(below, variable)
        for variable, sharded in zip(variables, are_sharded, strict=True)
    ]
    try:
        with HOOKS:
            (value, aux), (by_variable, by_tensor) = jax.value_and_grad(
                of_values, argnums=(0, 1), has_aux=True
            )(values, list(tensors))
        was_read = kept[-1].was_read
    finally:
        for scope in kept:
            scope.release()
    gradients = [
        gradient if id(variable) in was_read else None
        for variable, gradient in zip(variables, by_variable, strict=True)
    ]
    return value, aux, gradients + by_tensor


class _Differentiated(Overlay):
    """Values to differentiate by; assigned ones are those of the scope below.

    As on other backends, no gradient passes through an assignment, and what is
    read after it has a gradient of its own.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        values: Sequence[Any],
        are_sharded: Sequence[bool],
    ) -> None:
        super().__init__(eagerly=eagerly)
        self.traced: list[tuple[keras.Variable, Any]] = []
        self._given = dict(zip(map(id, variables), values, strict=True))
        # Those that are read from below. One in parts is gathered there.
        self._changed = {
            id(variable)
            for variable, sharded in zip(variables, are_sharded, strict=True)
            if sharded
        }

    def get_current_value(self, variable: keras.Variable) -> Any:
        key = id(variable)
        self.was_read.add(key)
        given = self._given.get(key)
        if given is not None and key not in self._changed:
            return given
        value = value_in(self.below, variable)
        return value if given is None else _shifted(value, given)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        value = lax.stop_gradient(value)
        if isinstance(value, jax.core.Tracer) and current_trace() is None:
            base = base_scope()
            if base is None or isinstance(base, LayerScope):
                raise _leaving(variable, value)
            self.traced.append((variable, value))
        super().add_update((variable, value))

    def check(self) -> None:
        """Checks that assigned values can leave the trace that made them."""
        for variable, value in self.traced:
            try:
                jnp.copy(value)
            except jax.errors.UnexpectedTracerError as error:
                raise _leaving(variable, value) from error

    def forget(self, variable: keras.Variable) -> None:
        self._changed.add(id(variable))

    def release(self) -> None:
        super().release()
        self.traced.clear()
        self._given.clear()


def _is_differentiated() -> bool:
    """Tells whether this thread calls a function that is differentiated."""
    return isinstance(stateless_scope(), _Differentiated)


def _first(value: object, shift: object) -> Any:
    return value


def _first_and_sum(primals: Any, tangents: Any) -> tuple[Any, Any]:
    return primals[0], tangents[0] + tangents[1]


# Adds a value to another: only to its gradient.
_shifted = jax.custom_jvp(_first)
_shifted.defjvp(_first_and_sum)


def _is_sharded(variable: keras.Variable) -> bool:
    """Tells whether a replica of a compiled function gathers a variable."""
    trace = current_trace()
    replica_trace = None if trace is None else trace.of_replica
    return replica_trace is not None and replica_trace.is_sharded(variable)


def _leaving(variable: keras.Variable, value: object) -> TraceError:
    return TraceError(
        f"Variable '{variable.path}' was assigned in a function that "
        "`jax.jit`, `jax.checkpoint`, `keras.RematScope` or a loop of JAX "
        "traces, inside of a function that is differentiated.\nJAX only lets "
        "values leave the inner function as results. Received: "
        f"{value!r}. Expected: assignments outside of the inner function, or "
        "in a `keras_dist.function`. Return the value from the inner "
        "function, and assign the value in the function that is "
        "differentiated."
    )


def _value(below: object, variable: keras.Variable) -> Any:
    value = value_in(below, variable)
    if value is None:
        raise ValueError(
            f"Variable '{variable.path}' has no value yet.\nReceived: a "
            "variable that was made in a `keras.StatelessScope`, or while "
            "`fit` traced a step that does not get the variable as part of "
            "its state. Expected: a variable that has a value. Build the "
            "model first."
        )
    return value


def summed_by(
    replica: Callable[[], _Summing],
    what: str,
    add: Callable[[_Summing, Any], Any],
) -> Any:
    """Makes a sum over replicas differentiable: its gradient is one, too.

    `replica` returns the one that sums: JAX keeps traced functions, and may use
    them in another trace.
    """
    summed = jax.custom_vjp(lambda value: add(replica(), value))

    def forward(value: object) -> tuple[Any, None]:
        return summed(value), None

    def backward(_: None, gradient: object) -> tuple[Any]:
        return (replica().all_sum(f"the gradient of {what}", gradient),)

    summed.defvjp(forward, backward)
    return summed

"""Branches, seeds and gradients of Keras in compiled functions."""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import jax
import jax.numpy as jnp
import keras
from jax import lax
from jax.extend.core import jaxpr_as_fun

from keras_dist.core.context import in_replica_function
from keras_dist.errors import TraceError
from keras_dist.internals.hooks import as_hook
from keras_dist.internals.keras_internals import opened
from keras_dist.internals.keras_internals import stateless_scope
from keras_dist.plugin.front_end import HOOKS
from keras_dist.plugin.replica import Replica
from keras_dist.replica.gradients import Differentiated
from keras_dist.replica.scopes import Recording
from keras_dist.replica.scopes import is_recorded
from keras_dist.replica.scopes import replay
from keras_dist.replica.scopes import value_in
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.tracing import Trace
from keras_dist_jax.tracing import current_trace
from keras_dist_jax.tracing import eagerly

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


def hook_cond(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the function that `keras.ops.cond` calls.

    Values that JAX traces in a branch can leave it only as results, and so do
    the assignments of branches.
    """

    @functools.wraps(original)
    def cond(pred: Any, true_fn: Branch, false_fn: Branch) -> Any:
        if current_trace() is None and not is_recorded():
            return original(pred, true_fn, false_fn)
        branches = _Branch(true_fn), _Branch(false_fn)
        written = {id(v): v for each in branches for v in each.written}
        # A branch leaves what it does not assign as it is.
        kept = {
            key: lax.convert_element_type(
                _value(stateless_scope(), variable), variable.dtype
            )
            for key, variable in written.items()
            if any(variable not in each for each in branches)
        }
        result, values = original(
            pred, *[each.giving(written, kept) for each in branches]
        )
        variables = written.values()
        replay(zip(variables, values, strict=True))
        return result

    return cond


@as_hook
def hook_loss_scaling(
    original: Any, self: Any, grads: Any, trainable_variables: Any = None
) -> None:
    """Stands for what an optimizer that scales losses does to variables.

    On JAX, Keras' own can't be applied outside of its trainer.
    """
    trained, state = self._trainable_variables, self.variables
    is_ours = any("distribute_strategy" in vars(each) for each in trained[:1])
    is_ours = is_ours or in_replica_function() or is_recorded()
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


class _Branch:
    """A branch of `cond`, which is traced once: what it gives and assigns."""

    def __init__(self, branch: Branch) -> None:
        self.written: list[keras.Variable] = []

        def run() -> Any:
            with _in_branch() as scope:
                result = branch()
                written = scope.written
            self.written += [variable for variable, _ in written]
            return result, [
                lax.convert_element_type(value, variable.dtype)
                for variable, value in written
            ]

        self._program, shapes = jax.make_jaxpr(run, return_shape=True)()
        self._structure = jax.tree.structure(shapes)

    def __contains__(self, variable: keras.Variable) -> bool:
        return any(variable is each for each in self.written)

    def giving(self, keys: Iterable[int], kept: Mapping[int, Any]) -> Branch:
        """Makes a branch that also returns values of variables, by id."""

        def run() -> Any:
            leaves = jaxpr_as_fun(self._program)()
            result, new = self._structure.unflatten(leaves)
            left = dict(kept) | dict(
                zip(map(id, self.written), new, strict=True)
            )
            return result, [left[key] for key in keys]

        return run


@contextlib.contextmanager
def _in_branch() -> Iterator[Recording]:
    """Opens the scope of one branch, which records assignments."""
    scope = Recording(eagerly=eagerly)
    # Without a trace, it is under `keras_dist.value_and_grad`, not compiled.
    trace = current_trace() or Trace({}, None)
    trace.branches += 1
    try:
        with opened(scope):
            yield scope
    finally:
        trace.branches -= 1
        scope.release()


def differentiate(
    fn: Callable[..., tuple[Any, Any]],
    variables: Sequence[keras.Variable],
    tensors: Sequence[Any],
) -> Differentiated:
    """See `Differentiates.differentiate`."""
    # JAX differentiates functions of arrays. So `fn` reads variables from an
    # overlay, and the values that it assigns leave as results, to be assigned
    # once JAX is done.
    kept: list[Any] = []

    def of_values(values: list[Any], tensors: list[Any]) -> tuple[Any, Any]:
        pairs = list(zip(variables, values, are_in_parts, strict=True))
        overlay = _Differentiated(
            [(v, value) for v, value, in_parts in pairs if not in_parts],
            jax.ensure_compile_time_eval,
        )
        overlay.shifts = {id(v): x for v, x, in_parts in pairs if in_parts}
        try:
            with overlay:
                value, aux = fn(*tensors)
            written = overlay.written
            kept[:] = overlay.was_read, [variable for variable, _ in written]
        finally:
            overlay.release()
        return jnp.asarray(value), (aux, [new for _, new in written])

    below = stateless_scope()
    are_in_parts = [*map(_is_in_parts, variables)]
    values = [
        jnp.zeros(variable.shape, variable.dtype)
        if in_parts
        else _value(below, variable)
        for variable, in_parts in zip(variables, are_in_parts, strict=True)
    ]
    with HOOKS:
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


class _Differentiated(Recording):
    """Values to differentiate by; those in parts are gathered where read."""

    # By id of a variable in parts: zeros, whose gradient is the variable's.
    shifts: dict[int, Any]

    def get_current_value(self, variable: keras.Variable) -> Any:
        value = super().get_current_value(variable)
        shift = self.shifts.get(id(variable))
        if shift is None or id(variable) in self.state_mapping:
            return value
        return _shifted(value, shift)

    def forget(self, variable: keras.Variable) -> None:
        super().forget(variable)
        self.shifts.pop(id(variable), None)


def _first(value: Any, shift: Any) -> Any:
    return value


def _first_and_sum(primals: Any, tangents: Any) -> tuple[Any, Any]:
    return primals[0], tangents[0] + tangents[1]


# Adds zeros to a value, which are not computed.
_shifted = jax.custom_jvp(_first)
_shifted.defjvp(_first_and_sum)


def _is_in_parts(variable: keras.Variable) -> bool:
    """Tells whether a replica of a compiled function gathers a variable."""
    trace = current_trace()
    region = None if trace is None else trace.region
    return region is not None and region.is_in_parts(variable)


def _check_written(
    variables: Sequence[keras.Variable], values: Sequence[Any]
) -> None:
    """Checks that assigned values can leave the trace that made them."""
    for variable, value in zip(variables, values, strict=True):
        if not isinstance(value, jax.core.Tracer):
            continue
        try:
            jnp.copy(value)
        except jax.errors.UnexpectedTracerError as error:
            raise TraceError(
                f"Variable '{variable.path}' was assigned in a function that "
                "`jax.jit`, `jax.checkpoint`, `keras.RematScope` or a loop "
                "of JAX traces, inside of a function that is differentiated. "
                "JAX only lets values leave the inner function as results. "
                f"Received: {value!r}. Expected: assignments outside of the "
                "inner function. Return the value from it, and assign the "
                "value in the function that is differentiated."
            ) from error


def _value(below: Any, variable: keras.Variable) -> Any:
    value = value_in(below, variable)
    if value is None:
        raise ValueError(
            f"Variable '{variable.path}' has no value yet. Received: a "
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

    def forward(value: Any) -> tuple[Any, None]:
        return summed(value), None

    def backward(_: None, gradient: Any) -> tuple[Any]:
        return (replica().all_sum(f"the gradient of {what}", gradient),)

    summed.defvjp(forward, backward)
    return summed

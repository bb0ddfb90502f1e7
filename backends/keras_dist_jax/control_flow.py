"""Hooks for branches and seeds of Keras in compiled functions."""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import jax
import keras
from jax import lax

from keras_dist.internals.stateless import opened
from keras_dist.replica.scopes import Recording
from keras_dist.replica.scopes import is_recorded
from keras_dist.replica.scopes import replay
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.tracing import current_trace
from keras_dist_jax.tracing import eagerly

Branch = Callable[[], Any]


@functools.cache
def install_cond() -> None:
    """Makes `keras.ops.cond` keep the assignments of its branches.

    Values that JAX traces in a branch can leave it only as results.
    """
    internals.hook_cond(_hook_cond)


@functools.cache
def install_global_seed() -> None:
    """Lets `keras.random` draw without a seed in compiled functions.

    Keras refuses that under any trace of JAX, where the seed would be lost.
    """
    internals.hook_global_seed(_hook_global_seed)


def _hook_global_seed(original: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(original)
    def global_seed_generator() -> Any:
        made = None if current_trace() is None else internals.global_seed()
        return original() if made is None else made

    return global_seed_generator


def _hook_cond(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def cond(pred: Any, true_fn: Branch, false_fn: Branch) -> Any:
        if current_trace() is None and not is_recorded():
            return original(pred, true_fn, false_fn)
        variables = {**_assigned(true_fn), **_assigned(false_fn)}
        result, values = original(
            pred,
            _giving(true_fn, list(variables.values())),
            _giving(false_fn, list(variables.values())),
        )
        replay(zip(variables.values(), values, strict=True))
        return result

    return cond


def _assigned(branch: Branch) -> dict[int, keras.Variable]:
    """Returns the variables that a branch assigns, by id."""
    found: dict[int, keras.Variable] = {}

    def probe() -> Any:
        scope = Recording(eagerly=eagerly)
        with opened(scope), _in_branch():
            result = branch()
        found.update({id(v): v for v, _ in scope.written})
        scope.release()
        return result

    jax.eval_shape(probe)
    return found


def _giving(branch: Branch, variables: list[keras.Variable]) -> Branch:
    """Makes a branch also return the values that it leaves in the variables."""

    def run() -> Any:
        scope = Recording(eagerly=eagerly)
        with opened(scope), _in_branch():
            result = branch()
            values = [
                lax.convert_element_type(
                    scope.get_current_value(variable), variable.dtype
                )
                for variable in variables
            ]
        scope.release()
        return result, values

    return run


@contextlib.contextmanager
def _in_branch() -> Iterator[None]:
    trace = current_trace()
    if trace is None:  # under `keras_dist.value_and_grad`, not compiled
        yield
        return
    trace.branches += 1
    try:
        yield
    finally:
        trace.branches -= 1

"""Branches that assign variables, in compiled functions."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import keras
from jax import lax

from keras_dist.training.overlay import Recording
from keras_dist.training.overlay import opened
from keras_dist.training.overlay import replay
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.tracing import current_trace
from keras_dist_jax.tracing import eagerly

Branch = Callable[[], Any]


@functools.cache
def install_cond() -> None:
    """Makes `keras.ops.cond` keep what its branches assign.

    What is traced in a branch can't leave it but as a result.
    """
    internals.hook_cond(_hook_cond)


def _hook_cond(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def cond(pred: Any, true_fn: Branch, false_fn: Branch) -> Any:
        if current_trace() is None:
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
    """The variables that a branch assigns."""
    found: dict[int, keras.Variable] = {}

    def probe() -> Any:
        scope = Recording(eagerly=eagerly)
        with opened(scope):
            result = branch()
        found.update({id(v): v for v, _ in scope.written})
        scope.release()
        return result

    jax.eval_shape(probe)
    return found


def _giving(branch: Branch, variables: list[keras.Variable]) -> Branch:
    """The branch, with the values it leaves in these variables."""

    def run() -> Any:
        scope = Recording(eagerly=eagerly)
        with opened(scope):
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

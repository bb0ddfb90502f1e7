"""Comparisons of workers in a loop of the user's around `run`."""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

from keras_dist.core import context
from keras_dist.fit.workers import agreement
from keras_dist.fit.workers import drift
from keras_dist.fit.workers import fingerprint
from keras_dist.plugin.recorder import of_its_own
from keras_dist.plugin.workers import Workers

# Functions of one code that are compared.
_MOST = 16


def in_run(
    workers: Workers | None, fn: Callable[..., Any] | None = None
) -> contextlib.AbstractContextManager[None]:
    """Returns the context of a call of `run`, or of `fit`.

    Workers compare a step's function before its first call, and variables that
    were assigned outside since the last call."""
    if workers is None:
        return contextlib.nullcontext()
    if fn is not None:
        _compare(fn, workers)
    if workers.assigned and not workers.is_open and not workers.is_tracing:
        variables = drift.comparable(list(workers.assigned.values()))
        workers.assigned.clear()
        if variables:
            drift.check_values(variables, workers, "before `run`")
    return workers.opened()


@of_its_own("`run`")
def _compare(fn: Callable[..., Any], workers: Workers) -> None:
    """Compares what a function computes on the workers, before its first call.

    Of functions that are made again in each step, only the first ones are."""
    key: Any = fn
    while isinstance(key, functools.partial):
        key = key.func
    key = getattr(key, "python_function", key)
    key = getattr(key, "__func__", key)
    if not inspect.isfunction(key):
        key = type(key)
    code = getattr(key, "__code__", key)
    if key in workers.compared or workers.num_compared[code] >= _MOST:
        return
    facts = fingerprint.of_step(fn)
    if workers.is_tracing:  # the outer function is compared
        context.note_exchange(f"step {agreement.note_of(facts)}")
        return
    agreement.compare(facts, workers, "a comparison of steps")
    workers.compared.add(key)
    workers.num_compared[code] += 1

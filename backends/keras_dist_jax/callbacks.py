"""Host callbacks inside of a step, and what to do when one raises.

A `jax.pure_callback` runs on one device. If it raises, that device never
arrives at the step's collectives, the others wait for it, and after 40 seconds
the runtime aborts the process. So an exception is kept until the step is over,
and the callback returns zeros meanwhile. The step's results are then thrown
away.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

_CALLBACKS = ("pure_callback", "io_callback", "debug_callback")


class Failures:
    """Exceptions raised by host callbacks, until somebody asks.

    Attributes:
        errors: List of them, in the order they came.
    """

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def add(self, error: BaseException) -> None:
        """Keeps an exception; called on a thread of the runtime."""
        self.errors.append(error)

    def take(self) -> BaseException | None:
        """The first exception, if there was one; all are forgotten."""
        if not self.errors:
            return None
        first = self.errors[0]
        self.errors.clear()
        return first


class _Guarded:
    """A callback that always returns.

    Args:
        callback: What the program called, on flat arguments.
        results: Its results' shapes and dtypes; empty if it has none.
        failures: Where its exceptions go.
    """

    def __init__(
        self,
        callback: Callable[..., Any],
        results: Sequence[Any],
        failures: Failures,
    ) -> None:
        self._callback = callback
        self._results = results
        self._failures = failures

    def __call__(self, *args: Any) -> Any:
        try:
            return self._callback(*args)
        except BaseException as error:
            self._failures.add(error)
            return tuple(np.zeros(r.shape, r.dtype) for r in self._results)


def guarded(fn: Callable[..., Any], failures: Failures) -> Callable[..., Any]:
    """`fn`, with its host callbacks made to return in any case.

    Args:
        fn: A function that is being traced, on nested arrays.
        failures: Where the callbacks' exceptions go.

    Returns:
        A function with the same arguments and results, for use in a trace.
    """

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        closed = _guard_closed(closed, failures)
        leaves = core.jaxpr_as_fun(closed)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    return run


def _guard_closed(closed: Any, failures: Failures) -> Any:
    return closed.replace(jaxpr=_guard_jaxpr(closed.jaxpr, failures))


def _guard_jaxpr(jaxpr: Any, failures: Failures) -> Any:
    return jaxpr.replace(
        eqns=[_guard_equation(eqn, failures) for eqn in jaxpr.eqns]
    )


def _guard_equation(eqn: Any, failures: Failures) -> Any:
    params = {k: _guard_param(v, failures) for k, v in eqn.params.items()}
    if eqn.primitive.name in _CALLBACKS:
        params["callback"] = _Guarded(
            params["callback"], params.get("result_avals", ()), failures
        )
    return eqn.replace(params=params)


def _guard_param(param: Any, failures: Failures) -> Any:
    if isinstance(param, core.ClosedJaxpr):
        return _guard_closed(param, failures)
    if isinstance(param, core.Jaxpr):
        return _guard_jaxpr(param, failures)
    if isinstance(param, (tuple, list)) and any(
        isinstance(item, (core.ClosedJaxpr, core.Jaxpr)) for item in param
    ):
        return type(param)(_guard_param(item, failures) for item in param)
    return param

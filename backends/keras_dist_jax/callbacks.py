"""Host callbacks inside of a step whose exceptions are kept until its end.

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
    """Exceptions of host callbacks, until they are taken.

    Attributes:
        errors: List of the exceptions, in the order in which they were raised.
    """

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def add(self, error: BaseException) -> None:
        """Keeps an exception; called on a thread of the runtime."""
        self.errors.append(error)

    def take(self) -> BaseException | None:
        """Returns the first exception or `None`, and forgets all."""
        if not self.errors:
            return None
        first = self.errors[0]
        self.errors.clear()
        return first


class _Guarded:
    """A host callback that returns zeros where it would raise.

    `results` are the shapes and dtypes of its results. Exceptions go to
    `failures`.
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
    """Makes the host callbacks of a traced function return in any case.

    Returns:
        A function with the arguments and results of `fn`, for use in a trace.
    """

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        closed = _guard_closed(closed, failures)
        leaves = core.jaxpr_as_fun(closed)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    run.__name__ = fn.__name__
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

"""Host callbacks inside of a step whose exceptions are kept until its end.

A `jax.pure_callback` runs on one device. If it raises, that device never
arrives at the step's collectives, the others wait for it, and after 40 seconds
the runtime aborts the process. So an exception is kept until the step is over,
and the callback returns zeros meanwhile. The step's results are then thrown
away.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from keras_dist_jax.jaxprs import rewritten

_CALLBACKS = ("pure_callback", "io_callback", "debug_callback")


class Failures:
    """Exceptions of host callbacks, in order, until they are taken."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def take(self) -> BaseException | None:
        """Returns the first exception or `None`, and forgets all."""
        if not self.errors:
            return None
        first = self.errors[0]
        self.errors.clear()
        return first


@dataclasses.dataclass(frozen=True, eq=False)
class _Guarded:
    """A host callback that returns zeros where it would raise.

    `results` are the shapes and dtypes of its results. Exceptions go to
    `failures`.
    """

    callback: Callable[..., Any]
    results: Sequence[Any]
    failures: Failures

    def __call__(self, *args: Any) -> Any:
        try:
            return self.callback(*args)
        except BaseException as error:
            self.failures.errors.append(error)
            return tuple(np.zeros(r.shape, r.dtype) for r in self.results)


def guarded(fn: Callable[..., Any], failures: Failures) -> Callable[..., Any]:
    """Makes the host callbacks of a function return, while it is traced."""

    def guard(equation: Any) -> Any:
        if equation.primitive.name not in _CALLBACKS:
            return equation
        params = equation.params
        callback = _Guarded(
            params["callback"], params.get("result_avals", ()), failures
        )
        return equation.replace(params={**params, "callback": callback})

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        call = core.jaxpr_as_fun(rewritten(closed, guard))
        leaves = call(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    run.__name__ = fn.__name__
    return run

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


@dataclasses.dataclass(frozen=True, eq=False)
class _Guarded:
    """A host callback that returns zeros where it would raise."""

    callback: Callable[..., Any]
    results: Sequence[Any]
    failures: list[BaseException]

    def __call__(self, *args: Any) -> Any:
        try:
            return self.callback(*args)
        except BaseException as error:
            self.failures.append(error)
            return tuple(np.zeros(r.shape, r.dtype) for r in self.results)


def guarded(
    fn: Callable[..., Any], failures: list[BaseException]
) -> Callable[..., Any]:
    """Makes the host callbacks of a function note errors in `failures`."""

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

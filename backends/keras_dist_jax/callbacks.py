"""Host callbacks inside of a step whose exceptions are kept until its end.

A device whose `jax.pure_callback` raises never arrives at the step's
collectives, and the runtime aborts the process. So the callback returns zeros,
and the step's results are thrown away.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend import core

from keras_dist_jax.jaxprs import rewritten

_CALLBACKS = ("pure_callback", "io_callback", "debug_callback")


def guarded(
    fn: Callable[..., Any], failures: list[BaseException]
) -> Callable[..., Any]:
    """Makes the host callbacks of a function note errors in `failures`."""

    def guard(equation: Any) -> Any:
        if equation.primitive.name not in _CALLBACKS:
            return equation
        params = equation.params
        callback, results = params["callback"], params.get("result_avals", ())

        def call(*args: Any) -> Any:
            try:
                return callback(*args)
            except BaseException as error:
                failures.append(error)
                return tuple(np.zeros(r.shape, r.dtype) for r in results)

        return equation.replace(params={**params, "callback": call})

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        call = core.jaxpr_as_fun(rewritten(closed, guard))
        leaves = call(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    run.__name__ = fn.__name__
    return run

"""Host callbacks inside of a step whose exceptions are kept until its end.

A device whose `jax.pure_callback` raises never arrives at the step's
collectives, and the runtime aborts the process. So the callback returns zeros,
and the step's results are thrown away.
"""

from typing import Any

import numpy as np

from keras_dist_jax.programs.jaxprs import rewritten

_CALLBACKS = ("pure_callback", "io_callback", "debug_callback")


def guarded(program: Any, failures: list[BaseException]) -> Any:
    """Makes the host callbacks of a program note errors in `failures`."""

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

    return rewritten(program, guard)

"""Makes an optimizer in parts whole while the chief saves or loads it.

Every worker enters these contexts together. They do nothing if variables are
whole anyway.
"""

import contextlib
from typing import Any

import keras

from keras_dist.plugin.powers import KeepsParts


def readable_by_chief(
    model: keras.Model,
) -> contextlib.AbstractContextManager[Any]:
    """Lets the chief alone read a model's optimizer inside the context."""
    variables, executor = _optimizer_of(model)
    if executor is None:
        return contextlib.nullcontext()
    return executor.readable_by_chief(variables)


def written_by_chief(
    model: keras.Model,
) -> contextlib.AbstractContextManager[Any]:
    """Lets the chief alone assign a model's optimizer inside the context."""
    variables, executor = _optimizer_of(model)
    if executor is None:
        return contextlib.nullcontext()
    return executor.written_by_chief(variables)


def _optimizer_of(
    model: keras.Model,
) -> tuple[list[keras.Variable], KeepsParts | None]:
    optimizer = getattr(model, "optimizer", None)
    variables = [] if optimizer is None else list(optimizer.variables)
    strategy = None
    if variables:
        strategy = vars(variables[0]).get("distribute_strategy")
    executor = None if strategy is None else strategy.executor
    return variables, executor if isinstance(executor, KeepsParts) else None

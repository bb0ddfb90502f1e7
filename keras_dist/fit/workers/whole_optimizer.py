"""An optimizer in parts, whole for a while on the worker that saves or loads.

Every worker enters these together. Where variables are whole anyway they do
nothing.
"""

import contextlib
from typing import Any

import keras

from keras_dist.plugin.powers import KeepsParts


def readable_by_chief(
    model: keras.Model,
) -> contextlib.AbstractContextManager[Any]:
    """Inside, the chief alone may read a model's optimizer.

    Args:
        model: A `keras.Model`.
    """
    variables, executor = _optimizer_of(model)
    if executor is None:
        return contextlib.nullcontext()
    return executor.readable_by_chief(variables)


def written_by_chief(
    model: keras.Model,
) -> contextlib.AbstractContextManager[Any]:
    """Inside, the chief alone assigns a model's optimizer.

    Args:
        model: A `keras.Model`.
    """
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

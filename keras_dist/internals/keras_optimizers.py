"""A door to Keras' private names: what an optimizer knows and does.

| name | why |
|---|---|
| `keras.Optimizer._clip_gradients` | norms are of all parts of a variable |
| `keras.Optimizer._filter_empty_gradients` | drops missing gradients |
| `keras.Optimizer._use_weight_decay` | is asked for the whole variable |
| `keras.Optimizer._learning_rate` | the schedule itself |
| `keras.Optimizer._track_variable` | Nadam leaves a variable untracked |
| `keras.Optimizer._var_key` | reads a value, which may be absent |
| `keras.Optimizer._trainable_variables` | those that it was built for |
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_dist.internals.private_names import private

for _name in (
    "keras.optimizers.Optimizer._clip_gradients",
    "keras.optimizers.Optimizer._filter_empty_gradients",
    "keras.optimizers.Optimizer._track_variable",
    "keras.optimizers.Optimizer._use_weight_decay",
    "keras.optimizers.Optimizer._var_key",
):
    private(_name)

# The classes of Keras that have an `apply` of their own.
WITH_APPLY: tuple[Any, ...] = (
    keras.optimizers.Optimizer,
    keras.optimizers.LossScaleOptimizer,
)


def build_without_values(
    optimizer: keras.Optimizer, variables: Sequence[keras.Variable]
) -> None:
    """Builds an optimizer for variables without values; it can't be applied."""
    for part in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if part is not None:
            vars(part)["_var_key"] = id
    # Outlines, because some backends would read a variable's value.
    optimizer.build([_Outline(variable) for variable in variables])


class _Outline:
    """The attributes of a variable that an optimizer makes its slots by."""

    def __init__(self, variable: keras.Variable) -> None:
        self.shape = variable.shape
        self.ndim = len(self.shape)
        self.dtype = variable.dtype
        self.name = variable.name
        self.path = variable.path
        self._value = None

    def __array__(self, dtype: object = None, copy: object = None) -> Any:
        # Some backends convert it to a tensor, to put slots on its device.
        return np.zeros((), dtype)


def inner_of(optimizer: keras.Optimizer) -> Any:
    """Returns the optimizer in a `LossScaleOptimizer`, or any other itself."""
    return vars(optimizer).get("inner_optimizer", optimizer)


def trainable_variables(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """Returns the variables that an optimizer was built for."""
    return list(optimizer._trainable_variables)


def learning_rate_of(optimizer: keras.Optimizer) -> Any:
    """Returns an optimizer's learning rate itself: a schedule or a variable."""
    return optimizer._learning_rate


def set_learning_rate_of(optimizer: keras.Optimizer, schedule: object) -> None:
    """Replaces a learning rate that is a schedule or another callable."""
    vars(optimizer)["_learning_rate"] = schedule


def track_variable(
    optimizer: keras.Optimizer, variable: keras.Variable
) -> None:
    """Adds a variable to an optimizer's `variables`."""
    optimizer._track_variable(variable)


def with_gradients(
    optimizer: keras.Optimizer,
    gradients: Sequence[Any],
    variables: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """Returns present gradients and their variables; warns as Keras does."""
    kept, of = optimizer._filter_empty_gradients(gradients, variables)
    return list(kept), list(of)


def uses_weight_decay(
    optimizer: keras.Optimizer, variable: keras.Variable
) -> bool:
    """Returns whether an optimizer applies weight decay to a variable."""
    return bool(optimizer._use_weight_decay(variable))


def update_with(
    optimizer: keras.Optimizer,
    clip: Callable[[list[Any]], list[Any]],
    decays: Callable[[keras.Variable], bool],
) -> None:
    """Replaces parts of one optimizer's `apply`."""

    def drop(grads: Any, variables: Any) -> tuple[list[Any], list[Any]]:
        pairs = zip(grads, variables, strict=True)
        kept = [(g, v) for g, v in pairs if g is not None]
        return [g for g, _ in kept], [v for _, v in kept]

    vars(optimizer).update(
        _clip_gradients=clip,
        _use_weight_decay=decays,
        _filter_empty_gradients=drop,
    )

"""A warning of steps that change gradients before they apply them."""

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist.replica.state import ReplicaState
from keras_dist.replica.state import ReplicaStep

# Optimizers whose first gradients were looked at.
_known: weakref.WeakSet[Any] = weakref.WeakSet()


def warn_if_changed(
    step: ReplicaState,
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Any],
    variables: Sequence[keras.Variable] | None,
) -> None:
    """Looks, once an optimizer, for gradients that are not as they came.

    A replica's gradients are of its own rows: what clips them by their norm,
    or changes them in another way that is not linear, gives other numbers
    than on one device.

    Args:
        step: The replica's `ReplicaState`.
        optimizer: The optimizer that they are given to.
        gradients: Sequence of tensors or `None`.
        variables: Sequence of the variables they belong to, or `None`.
    """
    if not isinstance(step, ReplicaStep) or optimizer in _known:
        return
    if not step.looks_at_gradients:
        step.kinds.looks_at_gradients = True  # from the next step on
        return
    step.kinds.looks_at_gradients = False
    _known.add(optimizer)
    if not step.replica.has_changed(step, gradients, variables or ()):
        return
    warnings.warn(
        f"Optimizer '{optimizer.name}' was given gradients that `train_step` "
        "has changed. There they are of each replica's own rows, and their "
        "sum is made in `optimizer.apply`, so what is not linear in them "
        "(clipping by norm, signs) gives other numbers than on one device. "
        "Change them in an `apply` of your own, in a subclass of the "
        "optimizer, which gets their sum, or use its `clipnorm`, "
        "`global_clipnorm` or `clipvalue`.",
        stacklevel=2,
    )

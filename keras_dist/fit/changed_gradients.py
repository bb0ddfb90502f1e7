"""Warns of a `train_step` that changes gradients before it applies them."""

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist.replica.state import ReplicaState
from keras_dist.replica.state import ReplicaStep

# Optimizers whose gradients have been checked.
_known: weakref.WeakSet[Any] = weakref.WeakSet()


def warn_if_changed(
    step: ReplicaState,
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Any],
    variables: Sequence[keras.Variable] | None,
) -> None:
    """Warns, once for each optimizer, of gradients that `train_step` changed.

    A replica's gradients are those of its own rows. Changes that are not
    linear, such as clipping by norm, give other numbers there than on one
    device.
    """
    if not isinstance(step, ReplicaStep) or optimizer in _known:
        return
    if not step.looks_at_gradients:
        # The next step remembers its gradients, so that they can be compared.
        step.kinds.looks_at_gradients = True
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

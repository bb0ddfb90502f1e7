"""Batch normalization with the statistics of all replicas' rows."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_dist.core import context
from keras_dist.internals.hooks import as_hook
from keras_dist.replica import state

# Marks layers that were made with `synchronized` under a strategy.
_MADE_HERE = "_keras_dist_synchronizes"


@as_hook
def hook_moments(
    original: Callable[..., Any], self: Any, inputs: object, mask: object
) -> tuple[Any, Any]:
    """Stands for `BatchNormalization._moments`, with all replicas' rows."""
    step: state.ReplicaState | None = state.current_step()
    call = state.current_call()
    if call is not None and self.synchronized:
        step = call
    moving = [self.moving_mean, self.moving_variance]
    if step is not None:
        step.same_on_all(moving)
        return _global_moments(step, self, inputs, mask)
    if not self.synchronized or _MADE_HERE not in vars(self):
        mean, variance = original(self, inputs, mask)
        return mean, variance
    # This thread has all rows. Keras synchronizes on TensorFlow only.
    self.synchronized = False
    try:
        mean, variance = original(self, inputs, mask)
    finally:
        self.synchronized = True
    return mean, variance


def hook_constructor(original: Callable[..., None]) -> Callable[..., None]:
    """Allows `synchronized=True`, which Keras does on TensorFlow only."""

    @functools.wraps(original)
    def __init__(
        self: Any, *args: Any, synchronized: bool = False, **kwargs: Any
    ) -> None:
        if not context.has_strategy():
            original(self, *args, synchronized=synchronized, **kwargs)
            return
        original(self, *args, **kwargs)
        self.synchronized = synchronized
        object.__setattr__(self, _MADE_HERE, True)

    # Keras reads the signature to find a layer's configuration.
    __init__.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return __init__


def _global_moments(
    step: state.ReplicaState, layer: Any, inputs: Any, mask: Any
) -> tuple[Any, Any]:
    """Returns the mean and variance over the rows of all replicas.

    Two sums, one after the other: a difference of large sums loses precision.
    """
    what = f"the batch statistics of layer '{layer.name}'"
    axes = tuple([int(axis) for axis in layer._reduction_axes])
    if mask is not None:
        mask = ops.cast(ops.expand_dims(mask, axis=-1), "bool")
        mask = ops.broadcast_to(mask, ops.shape(inputs))
    counted = (
        ops.ones_like(inputs) if mask is None else ops.cast(mask, inputs.dtype)
    )
    keep = step.share.keep

    def total(values: object) -> Any:
        if mask is not None:
            values = ops.where(mask, values, 0)
        return keep(ops.sum(values, axes))

    count = keep(ops.sum(counted, axes))
    both = step.replica.all_sum(what, ops.stack([total(inputs), count]))
    # Keras adds epsilon only with a mask, and the numbers have to agree.
    count = both[1] + (0.0 if mask is None else keras.config.epsilon())
    mean = both[0] / count
    shape = [1] * len(inputs.shape)
    shape[layer.axis] = -1
    distance = ops.square(inputs - ops.reshape(mean, shape))
    variance = step.replica.all_sum(what, total(distance)) / count
    return mean, variance

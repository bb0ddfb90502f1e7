"""Batch normalization over the global batch."""

import functools
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_dist.training.step import ReplicaStep
from keras_dist.training.step import current_step


def hook_moments(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `keras.layers.BatchNormalization._moments`."""

    @functools.wraps(original)
    def _moments(self: Any, inputs: Any, mask: Any) -> tuple[Any, Any]:
        step = current_step()
        if step is None:
            mean, variance = original(self, inputs, mask)
            return mean, variance
        return _global_moments(step, self, inputs, mask)

    return _moments


def _global_moments(
    step: ReplicaStep, layer: Any, inputs: Any, mask: Any
) -> tuple[Any, Any]:
    """Mean, then mean squared distance from it, over all replicas' rows.

    Two sums rather than one, because a difference of large sums is not a
    variance. Gradients flow through both.
    """
    what = f"the batch statistics of layer '{layer.name}'"
    axes = layer._reduction_axes
    if mask is not None:
        mask = ops.cast(ops.expand_dims(mask, axis=-1), "bool")
        mask = ops.broadcast_to(mask, ops.shape(inputs))
    counted = (
        ops.ones_like(inputs) if mask is None else ops.cast(mask, inputs.dtype)
    )
    keep = step.share.keep

    def total(values: Any) -> Any:
        if mask is not None:
            values = ops.where(mask, values, 0)
        return keep(ops.sum(values, axes))

    count = keep(ops.sum(counted, axes))
    both = step.replica.all_sum(what, ops.stack([total(inputs), count]))
    # As Keras does, so that the numbers agree: only with a mask.
    count = both[1] + (0.0 if mask is None else keras.config.epsilon())
    mean = both[0] / count
    shape = [1] * len(inputs.shape)
    shape[layer.axis] = -1
    distance = ops.square(inputs - ops.reshape(mean, shape))
    variance = step.replica.all_sum(what, total(distance)) / count
    return mean, variance

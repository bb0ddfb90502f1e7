"""Gives custom backward passes gradients of the size that one device has.

A replica differentiates the mean over its own rows; its gradients count by its
share of the rows. Backward passes that scale gradients work either way. One
that clips them, or takes their signs, needs them as large as on one device.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
from keras import tree

from keras_dist.core.rows import scaled
from keras_dist.replica.state import current_step


def hook_custom_gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a framework's `custom_gradient`, to rescale on replicas."""

    @functools.wraps(original)
    def custom_gradient(f: Callable[..., Any]) -> Any:
        if (getattr(f, "__module__", None) or "").startswith("keras_dist"):
            return original(f)  # keras_dist's own are linear.

        @functools.wraps(f)
        def forward(*args: Any, **kwargs: Any) -> Any:
            found = f(*args, **kwargs)
            step = current_step()
            if step is None or not isinstance(found, tuple) or len(found) != 2:
                return found
            weight, inverse = step.share.weight, step.share.inverse
            if isinstance(weight, float) and weight == 1.0:
                return found
            outputs, backward = found
            return outputs, _of_one_device(backward, weight, inverse)

        return original(forward)

    return custom_gradient


def _of_one_device(
    backward: Callable[..., Any], weight: Any, inverse: Any
) -> Callable[..., Any]:
    @functools.wraps(backward)
    def weighed(*args: Any, **kwargs: Any) -> Any:
        # PyTorch passes gradients by name, after the inputs.
        if "upstream" in kwargs:
            kwargs["upstream"] = _scaled(kwargs["upstream"], weight)
        else:
            args = tuple(_scaled(each, weight) for each in args)
        return _scaled(backward(*args, **kwargs), inverse)

    return weighed


def _scaled(nest: Any, factor: Any) -> Any:
    def one(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype"):
            return leaf
        if hasattr(leaf, "dense_shape"):  # a sparse gradient
            values = scaled(leaf.values, factor)
            return type(leaf)(values, leaf.indices, leaf.dense_shape)
        dtype = keras.backend.standardize_dtype(leaf.dtype)
        return scaled(leaf, factor) if "float" in dtype else leaf

    return tree.map_structure(one, nest)

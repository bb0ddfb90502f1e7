"""Gradients of functions, by `tf.GradientTape`."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.replica.differentiation import Differentiated


def differentiate(
    fn: Callable[..., tuple[Any, Any]],
    variables: Sequence[keras.Variable],
    tensors: Sequence[Any],
) -> Differentiated:
    """Implements `Differentiates.differentiate`."""
    # In a replica this is its own copy, or the tensor that it has assigned.
    read = [variable.value for variable in variables]
    # New tensors: `fn` may use the caller's through a closure, and those uses
    # are not differentiated.
    own = [tf.identity(tensor) for tensor in tensors]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch([*read, *own])
        value, aux = fn(*own)
    # After the tape's scope, so that only tapes around it record this.
    gradients = tape.gradient(value, [*read, *own])
    of_tensors = [
        None if gradient is None else tf.convert_to_tensor(gradient)
        for gradient in gradients[len(read) :]
    ]
    return value, aux, gradients[: len(read)] + of_tensors

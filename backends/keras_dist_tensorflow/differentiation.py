"""Gradients: what a tape saw of variables and tensors."""

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
    """See `Differentiates.differentiate`."""
    # A replica reads its own copy, or a tensor where it has assigned one.
    read = [variable.value for variable in variables]
    # Made anew: what `fn` reaches in another way is not differentiated.
    own = [tf.identity(tensor) for tensor in tensors]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch([*read, *own])
        value, aux = fn(*own)
    # Out of the tape's scope; one that is open around it sees this.
    gradients = tape.gradient(value, [*read, *own])
    of_tensors = [
        None if gradient is None else tf.convert_to_tensor(gradient)
        for gradient in gradients[len(read) :]
    ]
    return value, aux, gradients[: len(read)] + of_tensors

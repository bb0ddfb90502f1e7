"""The gradients that a step has computed, to tell them from changed ones."""

import functools
from typing import Any

import tensorflow as tf

from keras_dist.training.step import current_replica
from keras_dist_tensorflow.meetings import TensorFlowReplica


@functools.cache
def install_derivatives() -> None:
    """Makes replicas remember what tapes give them.

    Called after all else that wraps `tf.GradientTape.gradient`: what the
    user's step gets is remembered.
    """
    tape = tf.GradientTape
    original = tape.gradient

    @functools.wraps(original)
    def gradient(self: tf.GradientTape, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        state = current_replica()
        replica = None if state is None else state.replica
        if isinstance(replica, TensorFlowReplica):
            for each in tf.nest.flatten(result):
                replica.derivatives[id(each)] = each
        return result

    tape.gradient = gradient

"""The original behind the same door: what `api` is with `native`."""

from types import SimpleNamespace

import tensorflow as tf
from tensorflow.python.distribute import values

DistributedValues = tf.distribute.DistributedValues
PerReplica = values.PerReplica
Mirrored = values.Mirrored


def MirroredStrategy(devices=None, cross_device_ops=None):
    """A native strategy whose reductions never meet another strategy's.

    The default ones are collectives. On CPUs those of two strategies in one
    process can wait for each other.
    """
    return tf.distribute.MirroredStrategy(
        devices,
        cross_device_ops=cross_device_ops
        or tf.distribute.ReductionToOneDevice(),
    )


compat = SimpleNamespace(
    v1=SimpleNamespace(
        MirroredStrategy=lambda devices: (
            tf.compat.v1.distribute.MirroredStrategy(
                devices, tf.distribute.ReductionToOneDevice()
            )
        )
    )
)


def dataset_of(*batches):
    """The batches as the data that the original can distribute.

    Their rows are batched again: only the last batch may be smaller.
    """
    rows = [row for batch in batches for row in batch]
    return tf.data.Dataset.from_tensor_slices(
        tf.constant(rows, tf.float32)
    ).batch(len(batches[0]))


def leave_scopes():
    """Clears what a failed test left open, and says what that was."""
    stack = tf.compat.v1.get_default_graph()._distribution_strategy_stack
    left = [str(mode.strategy) for mode in stack]
    stack.clear()
    return left


def __getattr__(name):
    return getattr(tf.distribute, name)

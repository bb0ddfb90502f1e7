"""The original behind the same door: what `api` is with `native`."""

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


def __getattr__(name):
    return getattr(tf.distribute, name)

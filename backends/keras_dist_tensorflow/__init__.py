"""keras_dist on TensorFlow."""

import tensorflow as tf

from keras_dist.values import DistributedValues
from keras_dist.values import PerReplica
from keras_dist_tensorflow.backend import TensorFlowBackend

__all__ = ["TensorFlowBackend"]

DistributedValues.register(tf.distribute.DistributedValues)
PerReplica.register(tf.types.experimental.distributed.PerReplica)

"""The names of older versions of `tf.distribute`.

Example:

>>> strategy = keras_dist.compat.v1.MirroredStrategy(["cpu:0", "cpu:1"])
>>> value = keras_dist.PerReplica([1.0, 2.0])
>>> float(strategy.reduce("SUM", value))
3.0
"""

from keras_dist.compat import v1

__all__ = ["v1"]

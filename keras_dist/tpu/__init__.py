"""The names of `tf.tpu`.

Example:

>>> build = keras_dist.tpu.experimental.DeviceAssignment.build
>>> topology = keras_dist.tpu.experimental.Topology(
...     mesh_shape=[1, 1, 1, 2],
...     device_coordinates=[[[0, 0, 0, 0], [0, 0, 0, 1]]],
... )
>>> build(topology, computation_shape=[1, 1, 1, 2]).num_cores_per_replica
2
"""

from keras_dist.tpu import experimental

__all__ = ["experimental"]

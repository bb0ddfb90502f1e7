"""The names of `tf.tpu.experimental`."""

from keras_dist.core.device_assignment import DeviceAssignment
from keras_dist.core.device_assignment import DeviceOrderMode
from keras_dist.core.topology import Topology
from keras_dist.strategies.tpu import HardwareFeature
from keras_dist.strategies.tpu_system import initialize_tpu_system

__all__ = [
    "DeviceAssignment",
    "DeviceOrderMode",
    "HardwareFeature",
    "Topology",
    "initialize_tpu_system",
]

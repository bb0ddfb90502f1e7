"""tf.distribute's programming model for Keras 3, on every backend."""

from keras_dist import testing
from keras_dist.context import has_strategy
from keras_dist.context import in_cross_replica_context
from keras_dist.errors import BackendNotFoundError
from keras_dist.errors import DeviceError
from keras_dist.errors import KerasDistError
from keras_dist.errors import MetricMergeError
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.errors import StrategyMismatchError
from keras_dist.errors import UnsupportedKerasError
from keras_dist.errors import UnsupportedModelError
from keras_dist.errors import VirtualDevicesError
from keras_dist.strategies.default import get_strategy
from keras_dist.strategies.mirrored import MirroredStrategy
from keras_dist.strategies.one_device import OneDeviceStrategy
from keras_dist.strategy import Strategy
from keras_dist.virtual import apply_environment as _apply_environment
from keras_dist.virtual import list_devices
from keras_dist.virtual import set_virtual_devices

__version__ = "0.1.0"

__all__ = [
    "BackendNotFoundError",
    "DeviceError",
    "KerasDistError",
    "MetricMergeError",
    "MirroredStrategy",
    "OneDeviceStrategy",
    "ReplicaDivergenceError",
    "Strategy",
    "StrategyMismatchError",
    "UnsupportedKerasError",
    "UnsupportedModelError",
    "VirtualDevicesError",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "list_devices",
    "set_virtual_devices",
    "testing",
]

_apply_environment()

"""The programming model of tf.distribute for Keras 3, on every backend."""

from typing import TYPE_CHECKING

from keras_dist import _keras  # noqa: F401
from keras_dist import cluster_resolver
from keras_dist import compat
from keras_dist import experimental
from keras_dist import testing
from keras_dist.average_loss import compute_average_loss
from keras_dist.average_loss import scale_regularization_loss
from keras_dist.context import experimental_set_strategy
from keras_dist.context import has_strategy
from keras_dist.context import in_cross_replica_context
from keras_dist.cross_device_ops import CrossDeviceOps
from keras_dist.cross_device_ops import HierarchicalCopyAllReduce
from keras_dist.cross_device_ops import NcclAllReduce
from keras_dist.cross_device_ops import ReductionToOneDevice
from keras_dist.errors import BackendNotFoundError
from keras_dist.errors import ClusterError
from keras_dist.errors import DeviceError
from keras_dist.errors import KerasDistError
from keras_dist.errors import MetricMergeError
from keras_dist.errors import NumbersDifferError
from keras_dist.errors import OutOfRangeError
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.errors import StrategyMismatchError
from keras_dist.errors import TraceError
from keras_dist.errors import UnsupportedKerasError
from keras_dist.errors import UnsupportedModelError
from keras_dist.errors import VirtualDevicesError
from keras_dist.errors import WorkerLostError
from keras_dist.extended import StrategyExtended
from keras_dist.function import function
from keras_dist.gradients import gradient
from keras_dist.gradients import value_and_grad
from keras_dist.inputs.dataset import DistributedDataset
from keras_dist.inputs.iterator import DistributedIterator
from keras_dist.inputs.options import InputContext
from keras_dist.inputs.options import InputOptions
from keras_dist.inputs.options import InputReplicationMode
from keras_dist.inputs.options import RunOptions
from keras_dist.inputs.sharding import AutoShardPolicy
from keras_dist.printing import print
from keras_dist.reduction import ReduceOp
from keras_dist.replica_context import ReplicaContext
from keras_dist.replica_context import get_replica_context
from keras_dist.scan import scan_steps
from keras_dist.strategies.central_storage import CentralStorageStrategy
from keras_dist.strategies.default import get_strategy
from keras_dist.strategies.mirrored import MirroredStrategy
from keras_dist.strategies.multi_worker_mirrored import (
    MultiWorkerMirroredStrategy,
)
from keras_dist.strategies.one_device import OneDeviceStrategy
from keras_dist.strategy import Strategy
from keras_dist.summary import summary
from keras_dist.training.alone import watch_training as _watch_training
from keras_dist.values import DistributedValues
from keras_dist.values import Mirrored
from keras_dist.values import PerReplica
from keras_dist.virtual import apply_environment as _apply_environment
from keras_dist.virtual import list_devices
from keras_dist.virtual import set_virtual_devices

if TYPE_CHECKING:
    # `launch` is a package that can be called, unknown to type checkers.
    from keras_dist.launch.function import launch
else:
    from keras_dist import launch

__version__ = "0.1.0"

__all__ = [
    "AutoShardPolicy",
    "BackendNotFoundError",
    "CentralStorageStrategy",
    "ClusterError",
    "CrossDeviceOps",
    "DeviceError",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "KerasDistError",
    "MetricMergeError",
    "Mirrored",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "NumbersDifferError",
    "OneDeviceStrategy",
    "OutOfRangeError",
    "PerReplica",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "ReplicaDivergenceError",
    "RunOptions",
    "Strategy",
    "StrategyExtended",
    "StrategyMismatchError",
    "TraceError",
    "UnsupportedKerasError",
    "UnsupportedModelError",
    "VirtualDevicesError",
    "WorkerLostError",
    "cluster_resolver",
    "compat",
    "compute_average_loss",
    "experimental",
    "experimental_set_strategy",
    "function",
    "get_replica_context",
    "get_strategy",
    "gradient",
    "has_strategy",
    "in_cross_replica_context",
    "launch",
    "list_devices",
    "print",
    "scale_regularization_loss",
    "scan_steps",
    "set_virtual_devices",
    "summary",
    "testing",
    "value_and_grad",
]

_apply_environment()
_watch_training()

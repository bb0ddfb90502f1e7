"""The public names; `__init__.py` loads each of them on its first use."""

from . import cluster_resolver
from . import compat
from . import experimental
from . import testing
from . import tpu
from .core.context import experimental_set_strategy
from .core.context import has_strategy
from .core.context import in_cross_replica_context
from .core.options import CommunicationOptions
from .core.options import InputContext
from .core.options import InputOptions
from .core.options import InputReplicationMode
from .core.options import RunOptions
from .core.reduction import ReduceOp
from .core.values import DistributedValues
from .core.values import Mirrored
from .core.values import PerReplica
from .errors import BackendNotFoundError
from .errors import CheckpointError
from .errors import ClusterError
from .errors import DeviceError
from .errors import KerasDistError
from .errors import MetricMergeError
from .errors import NumbersDifferError
from .errors import OutOfRangeError
from .errors import ReplicaCodeWarning
from .errors import ReplicaDivergenceError
from .errors import StrategyMismatchError
from .errors import TraceError
from .errors import UnsupportedBackendError
from .errors import UnsupportedKerasError
from .errors import UnsupportedModelError
from .errors import VirtualDevicesError
from .errors import WorkerLostError
from .fit.workers.callbacks import on_chief
from .fit.workers.sharded_checkpoint import restore_sharded
from .fit.workers.sharded_checkpoint import save_sharded
from .inputs.dataset import DistributedDataset
from .inputs.feed_choice import AutoShardPolicy
from .inputs.iterator import DistributedIterator
from .inputs.own_rows.rows import Rows
from .launch.function import launch
from .plugin.backend import list_devices
from .plugin.backend import set_virtual_devices
from .replica.assigned import set_aggregation
from .replica.average_loss import compute_average_loss
from .replica.average_loss import scale_regularization_loss
from .replica.average_loss import sum_over_rows
from .replica.function import function
from .replica.function import print
from .replica.gradients import gradient
from .replica.gradients import value_and_grad
from .replica.replica_context import ReplicaContext
from .replica.replica_context import get_replica_context
from .strategies.central_storage import CentralStorageStrategy
from .strategies.cross_device_ops import CrossDeviceOps
from .strategies.cross_device_ops import HierarchicalCopyAllReduce
from .strategies.cross_device_ops import NcclAllReduce
from .strategies.cross_device_ops import ReductionToOneDevice
from .strategies.default import get_strategy
from .strategies.extended import StrategyExtended
from .strategies.mirrored import MirroredStrategy
from .strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from .strategies.one_device import OneDeviceStrategy
from .strategies.scan import scan_steps
from .strategies.strategy import Strategy
from .strategies.tpu import TPUStrategy
from .tools.summary import summary

__version__: str

__all__ = [
    "AutoShardPolicy",
    "BackendNotFoundError",
    "CentralStorageStrategy",
    "CheckpointError",
    "ClusterError",
    "CommunicationOptions",
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
    "ReplicaCodeWarning",
    "ReplicaContext",
    "ReplicaDivergenceError",
    "Rows",
    "RunOptions",
    "Strategy",
    "StrategyExtended",
    "StrategyMismatchError",
    "TPUStrategy",
    "TraceError",
    "UnsupportedBackendError",
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
    "on_chief",
    "print",
    "restore_sharded",
    "save_sharded",
    "scale_regularization_loss",
    "scan_steps",
    "set_aggregation",
    "set_virtual_devices",
    "sum_over_rows",
    "summary",
    "testing",
    "tpu",
    "value_and_grad",
]

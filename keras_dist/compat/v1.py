"""Strategies as `tf.compat.v1.distribute` has them, deprecated.

They are the newer ones, but that `reduce` needs no `axis`. What else was there
(`experimental_run`, `make_dataset_iterator`, ...) the newer ones have, too.
"""

from collections.abc import Iterable
from typing import Any
from typing import final

from keras_dist.core.reduction import ReduceOp
from keras_dist.strategies.central_storage import central_plan
from keras_dist.strategies.cross_device_ops import CrossDeviceOps
from keras_dist.strategies.cross_device_ops import check_cross_device_ops
from keras_dist.strategies.mirrored import mirrored_plan
from keras_dist.strategies.multi_worker_mirrored import MultiWorkerStrategy
from keras_dist.strategies.one_device import one_device_plan
from keras_dist.strategies.strategy import Strategy as StrategyV2

__all__ = [
    "CentralStorageStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "Strategy",
    "get_loss_reduction",
]


class Strategy(StrategyV2):
    """A `keras_dist.Strategy` whose `reduce` needs no `axis`.

    Args:
        plan: A `Plan`.
        cross_device_ops: A `CrossDeviceOps`, or `None` for the backend's own.

    Example:

    >>> from keras_dist.core.device import Device
    >>> cpu = Device("cpu", 0)
    >>> strategy = keras_dist.compat.v1.Strategy(Plan(((cpu,),), (cpu,)))
    >>> strategy.reduce("SUM", 1.0)
    1.0
    """

    def reduce(
        self, reduce_op: ReduceOp | str, value: Any, axis: Any = None
    ) -> Any:
        """As `keras_dist.Strategy.reduce`, over replicas only by default."""
        return super().reduce(reduce_op, value, axis)


@final
class MirroredStrategy(Strategy):
    """As `keras_dist.MirroredStrategy`.

    Args:
        devices: List of device strings, in replica order. `None` means all
            accelerators, or all CPU devices where there is none.
        cross_device_ops: A `CrossDeviceOps`, or `None` for the backend's own.

    Example:

    >>> strategy = keras_dist.compat.v1.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> strategy.num_replicas_in_sync
    2
    """

    def __init__(
        self,
        devices: Iterable[str] | str | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        checked = check_cross_device_ops(cross_device_ops)
        super().__init__(mirrored_plan(devices), checked)


@final
class CentralStorageStrategy(Strategy):
    """As `keras_dist.CentralStorageStrategy`.

    Args:
        compute_devices: List of device strings, in replica order. `None`
            means all accelerators, or all CPU devices where there is none.
        parameter_device: String, the device of variables, or a list of them.
            `None` means the CPU, or the only device that computes.

    Example:

    >>> strategy = keras_dist.compat.v1.CentralStorageStrategy(["cpu:1"])
    >>> strategy.extended.parameter_devices
    ('cpu:1',)
    """

    def __init__(
        self,
        compute_devices: Iterable[str] | str | None = None,
        parameter_device: Iterable[str] | str | None = None,
    ) -> None:
        super().__init__(central_plan(compute_devices, parameter_device))


@final
class OneDeviceStrategy(Strategy):
    """As `keras_dist.OneDeviceStrategy`.

    Args:
        device: String, such as `"cpu:1"` or `"/gpu:0"`.

    Example:

    >>> strategy = keras_dist.compat.v1.OneDeviceStrategy("cpu:0")
    >>> strategy.num_replicas_in_sync
    1
    """

    def __init__(self, device: str) -> None:
        super().__init__(one_device_plan(device))


@final
class MultiWorkerMirroredStrategy(MultiWorkerStrategy, Strategy):
    """As `keras_dist.MultiWorkerMirroredStrategy`.

    Args:
        cluster_resolver: A `ClusterResolver`, or `None` to look for one.
        communication_options: A `CommunicationOptions`, or `None`.

    Example:

    >>> strategy = keras_dist.compat.v1.MultiWorkerMirroredStrategy()
    >>> strategy.extended.should_checkpoint
    True
    """


def get_loss_reduction() -> ReduceOp:
    """How replicas' losses, and so their gradients, are combined: by sum.

    Example:

    >>> keras_dist.compat.v1.get_loss_reduction()
    <ReduceOp.SUM: 'SUM'>
    """
    return ReduceOp.SUM

"""The strategies of `tf.compat.v1.distribute`, deprecated.

They differ from the strategies of `keras_dist` in `reduce`, which needs no
`axis`. The other methods of that version (`experimental_run`,
`make_dataset_iterator`, ...) are methods of all strategies.
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
        plan: A `Plan` of the devices that compute and hold variables.
        cross_device_ops: A `CrossDeviceOps`, or `None` for the backend's own.

    Example:

    >>> from keras_dist.core.device import Device
    >>> cpu = Device("cpu", 0)
    >>> strategy = keras_dist.compat.v1.Strategy(Plan(((cpu,),), (cpu,)))
    >>> strategy.reduce("SUM", 1.0)
    1.0
    """

    def reduce(
        self, reduce_op: ReduceOp | str, value: object, axis: object = None
    ) -> Any:
        """Combines a value as `keras_dist.Strategy.reduce`; `axis` is optional.

        Args:
            reduce_op: `ReduceOp`, or its name in any case.
            value: Nest of per-replica values.
            axis: Integer, list of integers, or `None`: element by element.

        Returns:
            Nest of tensors on the first replica's device.
        """
        return super().reduce(reduce_op, value, axis)


@final
class MirroredStrategy(Strategy):
    """A `keras_dist.MirroredStrategy` whose `reduce` needs no `axis`.

    Args:
        devices: List of device strings, in replica order, or `None` for all.
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
    """A `keras_dist.CentralStorageStrategy` whose `reduce` needs no `axis`.

    Args:
        compute_devices: List of device strings, in replica order, or `None`
            for all.
        parameter_device: String, the device of the variables, or a list of
            devices. `None` means the CPU, or the only compute device.

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
    """A `keras_dist.OneDeviceStrategy` whose `reduce` needs no `axis`.

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
    """A `MultiWorkerMirroredStrategy` whose `reduce` needs no `axis`.

    Args:
        cluster_resolver: A `ClusterResolver`, or `None` to look for the
            environment variables of a cluster.
        communication_options: A `CommunicationOptions`, or `None`.

    Example:

    >>> strategy = keras_dist.compat.v1.MultiWorkerMirroredStrategy()
    >>> strategy.extended.should_checkpoint
    True
    """


def get_loss_reduction() -> ReduceOp:
    """Returns the operation that combines the replicas' losses, a sum.

    Example:

    >>> keras_dist.compat.v1.get_loss_reduction()
    <ReduceOp.SUM: 'SUM'>
    """
    return ReduceOp.SUM

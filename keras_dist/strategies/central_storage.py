"""CentralStorageStrategy: a single copy of each variable for all replicas."""

from collections.abc import Iterable
from collections.abc import Sequence
from typing import final

from keras_dist.core.device import Device
from keras_dist.core.device import resolve_devices
from keras_dist.core.plan import Plan
from keras_dist.errors import DeviceError
from keras_dist.plugin.backend import get_backend
from keras_dist.strategies.strategy import Strategy


@final
class CentralStorageStrategy(Strategy):
    """Synchronous training with a single copy of each variable.

    Variables, including the optimizer's, are stored on the parameter device.
    In each step, every replica reads them from that device. The gradients are
    summed there, and the optimizer's update runs there.

    Args:
        compute_devices: List of device strings, such as `["gpu:0", "gpu:1"]`,
            in replica order. `None` means all accelerators, or all CPU
            devices if there are no accelerators.
        parameter_device: String, the device of the variables, or a list of
            devices. With a list, variables are spread over the devices by
            size. `None` means the CPU. With one compute device, it means that
            device.

    Raises:
        DeviceError: If a name is not valid, if there is no such device, or if
            a device is named twice.

    Example:

    >>> strategy = keras_dist.CentralStorageStrategy(["cpu:0", "cpu:1"])
    >>> strategy.num_replicas_in_sync
    2
    >>> strategy.extended.parameter_devices
    ('cpu:0',)
    """

    def __init__(
        self,
        compute_devices: Iterable[str] | str | None = None,
        parameter_device: Iterable[str] | str | None = None,
    ) -> None:
        super().__init__(central_plan(compute_devices, parameter_device))


def central_plan(
    compute_devices: Iterable[str] | str | None,
    parameter_device: Iterable[str] | str | None,
) -> Plan:
    """Builds the plan of a `CentralStorageStrategy`, from its arguments."""
    available = get_backend().list_devices()
    computing = resolve_devices(compute_devices, available, "compute_devices")
    keeping: tuple[Device, ...]
    if parameter_device is not None:
        keeping = _keeping(parameter_device, available)
    elif len(computing) == 1:
        keeping = computing
    else:
        keeping = resolve_devices("cpu:0", available)
    return Plan(
        replicas=tuple((device,) for device in computing),
        variable_devices=keeping,
        is_central=True,
    )


def _keeping(
    parameter_device: Iterable[str] | str, available: Sequence[Device]
) -> tuple[Device, ...]:
    name = "parameter_device"
    if not isinstance(parameter_device, (str, Device)):
        if isinstance(parameter_device, Iterable):
            parameter_device = list(parameter_device)
        if parameter_device == []:
            raise DeviceError(
                f"Variables need a device. Received: {name}=[]. Expected: a "
                "device, a list of devices, or `None`, which means the CPU or "
                "the only device that computes."
            )
    return resolve_devices(parameter_device, available, name)

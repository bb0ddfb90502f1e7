"""CentralStorageStrategy: one copy of each variable, computation anywhere."""

from collections.abc import Iterable
from typing import final

from keras_dist.backend import get_backend
from keras_dist.device import Device
from keras_dist.device import default_devices
from keras_dist.device import resolve_devices
from keras_dist.plan import Plan
from keras_dist.strategy import Strategy


@final
class CentralStorageStrategy(Strategy):
    """Synchronous training with one copy of each variable.

    Variables, the optimizer's included, live on the parameter device. Each
    replica reads them there in each step; gradients are summed there, and the
    update runs there.

    Args:
        compute_devices: List of device strings, such as `["gpu:0", "gpu:1"]`,
            in replica order. `None` means all accelerators, or all CPU
            devices where there is none.
        parameter_device: String, the device of variables, or a list of them
            over which variables are spread by size. `None` means the CPU, or
            the only device that computes.

    Raises:
        DeviceError: If a device is unreadable, absent or named twice.

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
    """The plan of one copy of each variable.

    Args:
        compute_devices: As for `CentralStorageStrategy`.
        parameter_device: As for `CentralStorageStrategy`.

    Raises:
        DeviceError: If a device is unreadable, absent or named twice.
    """
    available = get_backend().list_devices()
    if compute_devices is None:
        computing = default_devices(available)
    else:
        computing = resolve_devices(compute_devices, available)
    keeping: tuple[Device, ...]
    if parameter_device is not None:
        keeping = resolve_devices(parameter_device, available)
    elif len(computing) == 1:
        keeping = computing
    else:
        keeping = resolve_devices("cpu:0", available)
    return Plan(
        replicas=tuple((device,) for device in computing),
        variable_devices=keeping,
        is_central=True,
    )

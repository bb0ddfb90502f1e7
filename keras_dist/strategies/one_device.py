"""OneDeviceStrategy: variables and computation on one device."""

from typing import final

from keras_dist.core.device import Device
from keras_dist.core.device import resolve_devices
from keras_dist.core.plan import Plan
from keras_dist.errors import DeviceError
from keras_dist.plugin.backend import get_backend
from keras_dist.strategies.strategy import Strategy


@final
class OneDeviceStrategy(Strategy):
    """A strategy that places variables and computation on one device.

    Args:
        device: String, such as `"cpu:1"` or `"/gpu:0"`.

    Raises:
        DeviceError: If the name is not valid, or if there is no such device.

    Example:

    >>> strategy = keras_dist.OneDeviceStrategy("cpu:0")
    >>> strategy.num_replicas_in_sync
    1
    """

    names_its_device = True

    def __init__(self, device: str) -> None:
        super().__init__(one_device_plan(device))


def one_device_plan(device: str) -> Plan:
    """Builds the plan of a `OneDeviceStrategy`, from its argument."""
    if not isinstance(device, (str, Device)):
        raise DeviceError(
            "OneDeviceStrategy takes one device.\nReceived: "
            f"device={device!r} of type {type(device).__name__}. Expected: a "
            "string such as 'cpu:0'. For several devices, use a "
            "`MirroredStrategy`."
        )
    available = get_backend().list_devices()
    (resolved,) = resolve_devices(device, available, "device")
    return Plan(((resolved,),), (resolved,))

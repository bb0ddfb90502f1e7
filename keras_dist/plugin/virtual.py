"""Listing devices, and splitting the CPU into virtual devices."""

import os

from keras_dist.errors import DeviceError
from keras_dist.plugin.backend import get_backend

VIRTUAL_DEVICES_VARIABLE = "KERAS_DIST_VIRTUAL_DEVICES"


def list_devices(device_type: str | None = None) -> list[str]:
    """Returns the names of this worker's devices, accelerators first.

    Args:
        device_type: String, `"cpu"`, `"gpu"` or `"tpu"`, or `None` for all.

    Returns:
        List of strings, such as `["gpu:0", "gpu:1", "cpu:0"]`.

    Example:

    >>> "cpu:0" in keras_dist.list_devices("cpu")
    True
    """
    if device_type is not None and device_type.lower() not in (
        "cpu",
        "gpu",
        "tpu",
    ):
        raise DeviceError(
            "`device_type` must be None, 'cpu', 'gpu' or 'tpu'. Received: "
            f"{device_type!r}."
        )
    devices = sorted(
        get_backend().list_devices(),
        key=lambda d: (not d.is_accelerator, d.type, d.index),
    )
    return [
        str(device)
        for device in devices
        if device_type is None or device.type == device_type.lower()
    ]


def set_virtual_devices(num_devices: int, device_type: str = "cpu") -> None:
    """Makes the CPU appear as several devices, for tests and experiments.

    Call it before anything uses a device. The environment variable
    KERAS_DIST_VIRTUAL_DEVICES has the same effect when keras_dist is imported.

    Args:
        num_devices: Integer, at least 1.
        device_type: String, `"cpu"`.

    Raises:
        VirtualDevicesError: If another number of devices is in use already.
        DeviceError: If `device_type` can't be split.

    Example:

    ```python
    import keras_dist
    keras_dist.set_virtual_devices(4)
    keras_dist.MirroredStrategy().num_replicas_in_sync  # 4
    ```
    """
    if (
        not isinstance(num_devices, int)
        or isinstance(num_devices, bool)
        or num_devices < 1
    ):
        raise ValueError(
            "`num_devices` must be an integer of at least 1. Received: "
            f"{num_devices!r}."
        )
    if device_type.lower() != "cpu":
        raise DeviceError(
            "Only the CPU can be split into virtual devices. Received: "
            f"device_type={device_type!r}. Expected: 'cpu'."
        )
    get_backend().set_virtual_devices(num_devices, device_type.lower())


def apply_environment() -> None:
    """Makes the virtual devices that KERAS_DIST_VIRTUAL_DEVICES asks for."""
    value = os.environ.get(VIRTUAL_DEVICES_VARIABLE)
    if not value:
        return
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(
            f"{VIRTUAL_DEVICES_VARIABLE} must be an integer of at least 1. "
            f"Received: {value!r}."
        )
    set_virtual_devices(int(value))

"""Devices: `Device`, and the parser of users' device names."""

import re
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass

from keras_dist.errors import DeviceError

_SPELLING = re.compile(
    r"(?:/?job:[\w-]+)?(?:/?replica:\d+)?(?:/?task:\d+)?"
    r"/?(?:device:)?(?P<type>[a-z]+)(?::(?P<index>\d+))?",
    re.IGNORECASE,
)
_TYPES = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "tpu": "tpu"}


@dataclass(frozen=True, order=True)
class Device:
    """One device of this worker, such as `cpu:0`.

    Args:
        type: String, `"cpu"`, `"gpu"` or `"tpu"`.
        index: Integer, its position among the worker's devices of that type.
    """

    type: str
    index: int

    def __str__(self) -> str:
        return f"{self.type}:{self.index}"

    @property
    def is_accelerator(self) -> bool:
        """True for any device but a CPU."""
        return self.type != "cpu"


def parse_device(spelling: str | Device, name: str = "") -> Device:
    """Parses the name of a device.

    Args:
        spelling: String. `"cpu:1"`, `"CPU:1"`, `"/gpu:0"`, `"cuda:0"` and
            `"/job:localhost/replica:0/task:0/device:GPU:0"` are all accepted;
            a missing index is 0. A `Device` is returned as it is.
        name: String, the name of the user's argument, for the error message.

    Returns:
        A `Device`, which may not exist on this worker.

    Raises:
        DeviceError: If the name can't be parsed.

    Example:

    >>> str(parse_device("/job:localhost/replica:0/task:0/device:GPU:1"))
    'gpu:1'
    """
    if isinstance(spelling, Device):
        return spelling
    match = (
        _SPELLING.fullmatch(spelling.strip())
        if isinstance(spelling, str)
        else None
    )
    type_ = match and _TYPES.get(match["type"].lower())
    if not match or not type_:
        of = f" of `{name}`" if name else ""
        raise DeviceError(
            f"A device{of} could not be read. Received: "
            f"{spelling!r}. Expected: a string such as 'cpu:0', 'gpu:1' or "
            "'/job:localhost/replica:0/task:0/device:GPU:0'."
        )
    return Device(type_, int(match["index"] or 0))


def default_devices(available: Sequence[Device]) -> tuple[Device, ...]:
    """Returns all accelerators, or all CPU devices if there is none."""
    accelerators = tuple(d for d in available if d.is_accelerator)
    return accelerators or tuple(available)


def resolve_devices(
    devices: str | Device | Iterable[str | Device] | None,
    available: Sequence[Device],
    name: str = "devices",
) -> tuple[Device, ...]:
    """Converts a user's devices to `Device`s that exist, in the same order;
    none means `default_devices`."""
    if isinstance(devices, (str, Device)):
        devices = [devices]
    if not isinstance(devices, (Iterable, type(None))):
        raise DeviceError(
            f"`{name}` must be a device's name, or a list of names. Received: "
            f"{name}={devices!r} of type {type(devices).__name__}. Expected: "
            "a string such as 'cpu:0', or a list of such strings."
        )
    asked = [] if devices is None else list(devices)
    if not asked:
        return default_devices(available)
    resolved = tuple(parse_device(device, name) for device in asked)
    for device in resolved:
        if device not in available:
            names = ", ".join(str(d) for d in available)
            hint = (
                "Choose from those."
                if device.is_accelerator
                else "Choose from these devices, or make more with "
                "`keras_dist.set_virtual_devices(n)` before any device "
                "is used."
            )
            raise DeviceError(
                f"Device '{device}' does not exist on this worker. Received: "
                f"{name}={asked!r}. Available: {names}. {hint}"
            )
    repeated = [str(d) for d in resolved if resolved.count(d) > 1]
    if repeated:
        raise DeviceError(
            f"Device '{repeated[0]}' is named {len(repeated)} times. Received: "
            f"{name}={asked!r}. Expected: each device once."
        )
    return resolved

"""MirroredStrategy: a copy of the model on each device of one worker."""

from collections.abc import Iterable
from typing import final

from keras_dist.backend import get_backend
from keras_dist.device import resolve_devices
from keras_dist.plan import Plan
from keras_dist.strategy import Strategy


@final
class MirroredStrategy(Strategy):
    """Synchronous training on several devices of one worker.

    Each device holds a copy of every variable and computes on its share of
    the global batch; copies stay equal.

    Args:
        devices: List of device strings, such as `["gpu:0", "gpu:1"]`, in
            replica order. `None` means all accelerators, or all CPU devices
            where there is none.
        cross_device_ops: Must be `None`: the backend chooses how gradients
            are summed. (Cross-device operations of your own are not there
            yet.)

    Raises:
        DeviceError: If a device is unreadable, absent or named twice.

    Example:

    >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> strategy.num_replicas_in_sync
    2
    """

    def __init__(
        self,
        devices: Iterable[str] | str | None = None,
        cross_device_ops: None = None,
    ) -> None:
        if cross_device_ops is not None:
            raise ValueError(
                "`cross_device_ops` must be None: the backend chooses how "
                "gradients are summed, and there is no other way yet. "
                f"Received: {cross_device_ops!r}."
            )
        resolved = resolve_devices(devices, get_backend().list_devices())
        super().__init__(
            Plan(
                replicas=tuple((device,) for device in resolved),
                variable_devices=resolved,
            )
        )

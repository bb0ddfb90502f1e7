"""MirroredStrategy: a copy of the model on each device of one worker."""

from collections.abc import Iterable
from typing import final

from keras_dist.core.device import resolve_devices
from keras_dist.core.plan import Plan
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.powers import check_optimizer_state
from keras_dist.plugin.powers import check_variables
from keras_dist.strategies.cross_device_ops import CrossDeviceOps
from keras_dist.strategies.cross_device_ops import check_cross_device_ops
from keras_dist.strategies.strategy import Strategy


@final
class MirroredStrategy(Strategy):
    """Synchronous training on several devices of one worker.

    Each device holds a copy of every variable and computes on its share of the
    global batch. All copies of a variable stay equal.

    Args:
        devices: List of device strings, such as `["gpu:0", "gpu:1"]`, in
            replica order. `None` means all accelerators, or all CPU devices
            if there are no accelerators.
        cross_device_ops: A `CrossDeviceOps` for reductions and broadcasts
            between devices, or `None` for the backend's own.
        optimizer_state: String. `"mirrored"` keeps a copy of the optimizer's
            variables on each device. With `"sharded"`, each replica keeps and
            updates its shard, and gets the parameters that the others update.
        variables: String. `"mirrored"` keeps a copy of each variable on each
            device. With `"sharded"`, each replica keeps only its shard of
            variables of at least 1,024 elements, those of the optimizer
            included. A layer gets the whole value while it computes.

    Raises:
        DeviceError: If a name is not valid, if there is no such device, if a
            device is named twice, or if the backend shards variables only
            among processes with one device each.
        TypeError: If `cross_device_ops` is any other object.
        ValueError: If `optimizer_state` or `variables` is any other value, if
            the backend can't shard them, or if they are sharded with
            `cross_device_ops`.

    Example:

    >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> strategy.num_replicas_in_sync
    2
    """

    def __init__(
        self,
        devices: Iterable[str] | str | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        optimizer_state: str = "mirrored",
        variables: str = "mirrored",
    ) -> None:
        checked = check_cross_device_ops(cross_device_ops)
        if checked is not None and "sharded" in (optimizer_state, variables):
            name = "variables" if variables == "sharded" else "optimizer_state"
            raise ValueError(
                f"With {name}='sharded', each replica gets only the parts of "
                "gradients that it updates. No CrossDeviceOps does this. "
                f"Received: cross_device_ops={cross_device_ops!r}. Pass only "
                "one of the two arguments."
            )
        plan = mirrored_plan(devices, optimizer_state, variables)
        super().__init__(plan, checked)


def mirrored_plan(
    devices: Iterable[str] | str | None,
    optimizer_state: str = "mirrored",
    variables: str = "mirrored",
) -> Plan:
    """Builds the plan of a `MirroredStrategy`, from its arguments."""
    shards_optimizer = check_optimizer_state(optimizer_state)
    shards_variables = check_variables(variables)
    resolved = resolve_devices(devices, get_backend().list_devices())
    return Plan(
        replicas=tuple((device,) for device in resolved),
        variable_devices=resolved,
        shards_optimizer=shards_optimizer,
        shards_variables=shards_variables,
    )

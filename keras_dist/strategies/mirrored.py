"""MirroredStrategy: a copy of the model on each device of one worker."""

from collections.abc import Iterable
from typing import final

from keras_dist.core.device import resolve_devices
from keras_dist.core.plan import Plan
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.capabilities import asks_to_shard
from keras_dist.strategies.cross_device_ops import CrossDeviceOps
from keras_dist.strategies.cross_device_ops import check_cross_device_ops
from keras_dist.strategies.logical_devices import divide_devices
from keras_dist.strategies.logical_devices import layouts_for
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
        logical_devices: Integer, the number of devices of each replica, which
            compute its share of the batch together, in the steps of `fit` and
            in a `function`; in `run` without one, the first computes. `None`
            means 1. With 8 devices and `logical_devices=4`, there are 2
            replicas: the first 4 devices, and the others.
        layout_map: Mapping from patterns to layouts, or a
            `keras.distribution.LayoutMap`: the variables that the logical
            devices of a replica divide. A pattern is a regular expression
            that matches the whole `path` of a variable. A layout is a tuple
            with `"logical"` for the axis to divide, and `None` for others.
            The optimizer's variables are divided as those that they are for.
            All other variables have a copy on each device.

    Raises:
        DeviceError: If a name is not valid, if there is no such device, if a
            device is named twice, if `logical_devices` does not divide the
            devices, or if variables or the optimizer's state are sharded on
            a backend that keeps one part in each process, as PyTorch does.
        TypeError: If `cross_device_ops` or `layout_map` is any other object.
        ValueError: If `optimizer_state`, `variables`, `logical_devices` or
            `layout_map` is any other value, if the backend can't shard
            variables or divide a replica, or if `cross_device_ops` is passed
            too. A layout that does not suit a variable raises it when the
            variable is made, and one that names no variable, in `fit`.

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
        logical_devices: int | None = None,
        layout_map: object = None,
    ) -> None:
        checked = check_cross_device_ops(cross_device_ops)
        if checked is not None and logical_devices not in (None, 1):
            raise ValueError(
                "Several logical devices combine values in the programs that "
                "they run together.\nNo CrossDeviceOps does this. Received: "
                f"logical_devices={logical_devices!r} and "
                f"cross_device_ops={cross_device_ops!r}. Pass only one of the "
                "two arguments."
            )
        if checked is not None and "sharded" in (optimizer_state, variables):
            name = "variables" if variables == "sharded" else "optimizer_state"
            raise ValueError(
                f"With {name}='sharded', each replica gets only the parts of "
                "gradients that it updates.\nNo CrossDeviceOps does this. "
                f"Received: cross_device_ops={cross_device_ops!r}. Pass only "
                "one of the two arguments."
            )
        plan = mirrored_plan(
            devices, optimizer_state, variables, logical_devices, layout_map
        )
        super().__init__(plan, checked)


def mirrored_plan(
    devices: Iterable[str] | str | None,
    optimizer_state: str = "mirrored",
    variables: str = "mirrored",
    logical_devices: int | None = None,
    layout_map: object = None,
) -> Plan:
    """Builds the plan of a `MirroredStrategy`, from its arguments."""
    shards_optimizer = asks_to_shard("optimizer_state", optimizer_state)
    shards_variables = asks_to_shard("variables", variables)
    resolved = resolve_devices(devices, get_backend().list_devices())
    return Plan(
        replicas=divide_devices(resolved, logical_devices),
        variable_devices=resolved,
        shards_optimizer=shards_optimizer,
        shards_variables=shards_variables,
        layouts=layouts_for(layout_map, logical_devices),
    )

"""Replicas of several logical devices: their devices, and their tensors."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist.core.device import Device
from keras_dist.core.variable_layouts import VariableLayouts
from keras_dist.core.variable_layouts import parse_layouts
from keras_dist.errors import DeviceError
from keras_dist.plugin.capabilities import UsesLogicalDevices
from keras_dist.plugin.capabilities import check_logical_devices
from keras_dist.replica.strategy_core import StrategyBase

Replicas = tuple[tuple[Device, ...], ...]


def divide_devices(
    devices: Sequence[Device], logical_devices: int | None
) -> Replicas:
    """Gives each replica its logical devices, in order; `None` means one."""
    count = check_count(logical_devices)
    if len(devices) % count:
        names = ", ".join(map(str, devices))
        raise DeviceError(
            "The devices can't be divided into replicas of equal size.\n"
            f"Received: logical_devices={count} and {len(devices)} device(s): "
            f"{names}. Expected: a multiple of {count} devices on each worker. "
            "Use other devices, or another number of logical devices."
        )
    return tuple(
        tuple(devices[start : start + count])
        for start in range(0, len(devices), count)
    )


def check_count(logical_devices: int | None) -> int:
    """Returns the number of logical devices, which the backend has to have."""
    count = 1 if logical_devices is None else logical_devices
    if not isinstance(count, (int, np.integer)) or count < 1:
        raise ValueError(
            "`logical_devices` must be the number of devices of each replica. "
            f"Received: logical_devices={logical_devices!r}. Expected: an "
            "integer of at least 1."
        )
    check_logical_devices(count)
    return count


def layouts_for(
    layout_map: object,
    logical_devices: int | None,
    needed: str = "`logical_devices=n`",
) -> VariableLayouts | None:
    """Converts a user's `layout_map` to the layouts of a plan."""
    if layout_map is not None and logical_devices is None:
        raise ValueError(
            "`layout_map` divides variables over the logical devices of a "
            "replica. Received: a `layout_map` without the number of logical "
            f"devices. Expected: {needed} too, for replicas of n devices."
        )
    if logical_devices is None:
        return None
    return parse_layouts(layout_map, logical_devices)


def check_id(strategy: StrategyBase, logical_device_id: Any) -> None:
    """Refuses a number that is none of a replica's logical devices."""
    count = strategy.plan.num_logical_devices
    is_integer = isinstance(logical_device_id, (int, np.integer))
    if not is_integer or not 0 <= logical_device_id < count:
        raise ValueError(
            "`logical_device_id` must be a logical device of the replica. "
            f"Received: logical_device_id={logical_device_id!r}. Expected: "
            f"an integer from 0 to {count - 1}; a replica of {strategy!r} has "
            f"{count} logical device(s)."
        )


def copy(strategy: StrategyBase, tensor: object) -> Any:
    """Keeps a copy of a tensor on each logical device of the replica."""
    return _divided(strategy, tensor, [1] * len(_shape_of(tensor)))


def split(
    strategy: StrategyBase, tensor: object, partition_dimensions: Sequence[int]
) -> Any:
    """Splits a tensor over the logical devices of each replica."""
    _check_split(strategy, tensor, partition_dimensions)
    return _divided(strategy, tensor, partition_dimensions)


def _divided(
    strategy: StrategyBase, tensor: object, parts: Sequence[int]
) -> Any:
    executor = strategy.executor
    if isinstance(executor, UsesLogicalDevices):
        return executor.split_tensor(tensor, parts)
    return tensor


def _check_split(
    strategy: StrategyBase, tensor: object, dimensions: object
) -> None:
    shape = _shape_of(tensor)
    received = (
        f"Received: partition_dimensions={dimensions!r} for a tensor of "
        f"shape {shape}."
    )
    if not isinstance(dimensions, (list, tuple)) or not all(
        isinstance(dimension, (int, np.integer)) and dimension > 0
        for dimension in dimensions
    ):
        raise ValueError(
            "`partition_dimensions` must be a list of positive integers. "
            f"{received}"
        )
    if len(dimensions) != len(shape):
        raise ValueError(
            "`partition_dimensions` must have as many elements as the "
            f"tensor has axes, {len(shape)}. {received}"
        )
    for axis, (size, parts) in enumerate(zip(shape, dimensions, strict=True)):
        # A size that is not known yet is `None`, or an object.
        if isinstance(size, (int, np.integer)) and size % parts:
            raise ValueError(
                "`partition_dimensions` must divide the tensor: axis "
                f"{axis} of size {size} can't be split into {parts}. "
                f"{received}"
            )
    count = strategy.plan.num_logical_devices
    if np.prod(dimensions, dtype=int) != count:
        raise ValueError(
            "The product of `partition_dimensions` must be the number of "
            f"logical devices of a replica, {count}. {received}"
        )


def _shape_of(tensor: Any) -> tuple[int | None, ...]:
    shape = getattr(tensor, "shape", None)
    return np.shape(tensor) if shape is None else tuple(shape)

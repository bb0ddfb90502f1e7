"""Destinations: the devices for results of reductions and broadcasts."""

from collections.abc import Sequence
from typing import Any

import keras

from keras_dist.core import context
from keras_dist.core.components import VariableComponent
from keras_dist.core.device import Device
from keras_dist.core.device import default_devices
from keras_dist.core.device import resolve_devices
from keras_dist.core.plan import Plan
from keras_dist.core.values import DistributedValues
from keras_dist.core.values import Mirrored
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.executor import Executor
from keras_dist.replica.strategy_core import StrategyBase


def executor_for(*things: Any) -> Executor:
    """Returns the current strategy's executor, else the things' or a new one.

    The things' is that of the first distributed variable among them.
    """
    strategy: StrategyBase | None = context.current_strategy()
    if strategy is not None:
        return strategy.executor
    for thing in things:
        owner = _owner(thing)
        if owner is not None:
            executor: Executor = owner.executor
            return executor
    backend = get_backend()
    device = default_devices(backend.list_devices())[0]
    return backend.executor(Plan(((device,),), (device,)))


def devices_at(destinations: object, executor: Executor) -> tuple[Device, ...]:
    """Returns the devices of names, variables, values, or a list of them."""
    if isinstance(destinations, (list, tuple)):
        if not destinations:
            raise ValueError(
                "`destinations` must not be empty. Received: "
                f"destinations={destinations!r}. Expected: a device's name, a "
                "variable, a value, or a list of those."
            )
        return sum(
            (devices_at(destination, executor) for destination in destinations),
            (),
        )
    if isinstance(destinations, (str, Device)):
        return resolve_devices(destinations, get_backend().list_devices())
    owner = _owner(destinations)
    if owner is not None:
        # Not those where the value rests now: a value that is read as a
        # combination of components means all devices.
        storage = owner.executor.storage(destinations)
        devices: tuple[Device, ...] = (
            storage.devices
            if storage.kind == "central"
            else owner.plan.variable_devices
        )
        return devices
    if isinstance(destinations, DistributedValues):
        values = destinations.values
        current: StrategyBase | None = context.current_strategy()
        # Known without a look, which tensors in a trace would not bear.
        if current and len(values) == current.plan.num_local_replicas:
            return current.plan.devices
        return tuple(executor.device_of(value) for value in values)
    if isinstance(destinations, keras.Variable):
        destinations = destinations.value
    return (executor.device_of(destinations),)


def spread(value: object, devices: Sequence[Device], executor: Executor) -> Any:
    """Copies a value to devices: a `Mirrored`, or a tensor on one device."""
    copies = [executor.put(value, device) for device in devices]
    return copies[0] if len(copies) == 1 else Mirrored(copies)


def components(value: object) -> tuple[Any, ...]:
    """Returns a per-replica value's components, else the value in a tuple."""
    return value.values if isinstance(value, DistributedValues) else (value,)


def _owner(thing: object) -> Any:
    """Returns a variable's strategy; `None` for components and other things."""
    is_variable = isinstance(thing, keras.Variable)
    if not is_variable or isinstance(thing, VariableComponent):
        return None
    return vars(thing).get("distribute_strategy")

"""The rows of a summary: each variable's kind, devices and bytes."""

from typing import Any

import keras

from keras_dist.core.device import Device
from keras_dist.core.device import default_devices
from keras_dist.core.plan import Plan
from keras_dist.core.plan import num_bytes
from keras_dist.fit.binding import binding_of
from keras_dist.internals import keras_internals
from keras_dist.plugin.backend import get_backend
from keras_dist.replica.variables import SyncOnReadVariable
from keras_dist.tools.summaries.counting import grouped
from keras_dist.tools.summaries.counting import slots_of
from keras_dist.tools.summaries.data import VariableRow


def rows_of(model: keras.Model) -> tuple[VariableRow, ...]:
    """Returns a row for each variable of a model."""
    binding = binding_of(model)
    strategy = None if binding is None else binding.strategy
    plain = _PlainDevices() if strategy is None else None
    groups = grouped(model)
    slots = slots_of(groups["trainable"], groups["optimizer"])
    are_slots = {id(slot) for slot in slots}
    rows = []
    for group, variables in groups.items():
        for variable in variables:
            if strategy is None:
                assert plain is not None
                devices = plain.of(variable)
                kept = dict.fromkeys(devices, num_bytes(variable))
            else:
                kept = strategy.executor.bytes_on(variable)
            kind = _kind(
                None if strategy is None else strategy.plan,
                variable,
                id(variable) in are_slots,
            )
            rows.append(
                VariableRow(
                    group,
                    variable.path,
                    tuple(variable.shape),
                    keras.backend.standardize_dtype(variable.dtype),
                    kind,
                    num_bytes(variable),
                    tuple((str(name), count) for name, count in kept.items()),
                )
            )
    return tuple(rows)


def _kind(plan: Plan | None, variable: keras.Variable, is_slot: bool) -> str:
    if plan is None:
        return "plain"
    if isinstance(variable, SyncOnReadVariable):
        return "on-read"
    if plan.is_central:
        return "central"
    if plan.shards_optimizer and is_slot and plan.num_replicas > 1:
        return "sharded"
    return "mirrored" if plan.num_replicas > 1 else "one copy"


class _PlainDevices:
    """The devices of variables outside of any strategy."""

    def __init__(self) -> None:
        backend = get_backend()
        self._default = default_devices(backend.list_devices())[0]
        plan = Plan(((self._default,),), (self._default,))
        self._executor = backend.executor(plan)

    def of(self, variable: keras.Variable) -> tuple[Device, ...]:
        if not keras_internals.has_value(variable):
            return (self._default,)
        found = self._executor.devices_of(variable)
        if not found:  # not on the plan's device
            value: Any = keras.ops.convert_to_tensor(variable)
            found = (self._executor.device_of(value),)
        return found

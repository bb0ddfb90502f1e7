"""A model's variables and their bytes, by group and device."""

import dataclasses
import math
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras

from keras_dist.core.device import Device
from keras_dist.core.device import default_devices
from keras_dist.core.plan import Plan
from keras_dist.core.plan import num_bytes
from keras_dist.internals import keras_internals
from keras_dist.internals import keras_saveables
from keras_dist.planning.estimates import ALL_SPLIT
from keras_dist.planning.estimates import SLOTS_SPLIT
from keras_dist.planning.estimates import Flat
from keras_dist.planning.estimates import Kept
from keras_dist.planning.estimates import Load
from keras_dist.planning.estimates import Placement
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.front_end import bound
from keras_dist.plugin.storage import Storage
from keras_dist.replica.on_read import SyncOnReadVariable

GROUPS = ("trainable", "non-trainable", "optimizer", "metrics")


@dataclass(frozen=True)
class VariableRow:
    """One variable in a summary.

    Args:
        group: String, one of `"trainable"`, `"non-trainable"`, `"optimizer"`
            and `"metrics"`.
        path: String, the variable's path.
        shape: Tuple of integers.
        dtype: String.
        kind: String. `"mirrored"`: a copy on each device. `"central"`: a
            single copy, on a parameter device. `"sharded"`: a shard on each
            device. `"on-read"`: replicas may have their own values, which are
            combined when the variable is read. `"one copy"`: there is one
            replica. `"plain"`: the model has no strategy.
        num_bytes: Integer, bytes of one copy.
        kept: Tuple of pairs of a device's name and the bytes on that device.
    """

    group: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    num_bytes: int
    kept: tuple[tuple[str, int], ...]

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices that keep the variable, primary first."""
        return tuple(name for name, _ in self.kept)


def check_built(model: keras.Model) -> None:
    """Raises `ValueError` unless `model` is a built `keras.Model`."""
    if not isinstance(model, keras.Model):
        raise ValueError(
            "Only the variables of a `keras.Model` can be counted. Received: "
            f"{model!r} of type {type(model).__name__}."
        )
    if not model.built:
        raise ValueError(
            f"Model '{model.name}' has no variables yet.\nReceived: a model "
            "that is not built. Expected: a built model. Begin it with a "
            "`keras.Input`, call `model.build(input_shape)`, or call it on a "
            "batch."
        )


def grouped(model: keras.Model) -> dict[str, list[keras.Variable]]:
    """Returns all variables of a model, each in one of `GROUPS`."""
    metrics = keras_saveables.metric_variables(model)
    of_optimizers = {
        id(variable): variable
        for optimizer in keras_saveables.all_optimizers(model).values()
        for variable in optimizer.variables
    }
    apart = metrics.keys() | of_optimizers.keys()
    weights = keras_saveables.layer_variables(model)
    weights = [v for v in weights if id(v) not in apart]
    sides = (
        [v for v in weights if v.trainable],
        [v for v in weights if not v.trainable],
        list(of_optimizers.values()),
        list(metrics.values()),
    )
    return dict(zip(GROUPS, sides, strict=True))


def slots_of(
    trainable: Sequence[keras.Variable], optimizer: Sequence[keras.Variable]
) -> list[keras.Variable]:
    """Returns the optimizer's slots, the variables kept for each parameter."""
    # A slot has the shape of a trainable variable; a scalar one also has that
    # variable's path in its name.
    shapes: dict[tuple[int, ...], list[str]] = {}
    for variable in trainable:
        start = variable.path.replace("/", "_") + "_"
        shapes.setdefault(tuple(variable.shape), []).append(start)
    return [
        variable
        for variable in optimizer
        if (starts := shapes.get(tuple(variable.shape)))
        and (tuple(variable.shape) or variable.name.startswith(tuple(starts)))
    ]


def load_of(model: keras.Model, optimizer: keras.Optimizer = None) -> Load:
    """Returns the bytes of a built model and its, or another, optimizer."""
    trainable, frozen, optimizer_variables, _ = grouped(model).values()
    state = optimizer_variables if optimizer is None else optimizer.variables
    slots = slots_of(trainable, state)
    lengths = [math.prod(slot.shape) for slot in slots]
    return Load(
        trainable=_total(trainable),
        frozen=_total(frozen),
        slots=tuple(
            Flat(length, num_bytes(slot) // max(length, 1))
            for slot, length in zip(slots, lengths, strict=True)
        ),
        counters=_total(state) - _total(slots),
    )


def _total(variables: Sequence[keras.Variable]) -> int:
    return sum(num_bytes(variable) for variable in variables)


def placement_of(plan: Plan) -> Placement:
    """Converts a `Plan` to the `Placement` of the planning tools."""
    return Placement(
        devices=tuple(map(str, plan.all_devices)),
        parameter_devices=tuple(map(str, plan.parameter_devices)),
        num_workers=plan.num_workers,
        split=_split_by(plan),
        num_logical=plan.num_logical_devices,
    )


def _split_by(plan: Plan) -> str | None:
    if not plan.shards:
        return None
    return ALL_SPLIT if plan.shards_variables else SLOTS_SPLIT


def load_of_replica(model: keras.Model, plan: Plan) -> Load:
    """Returns the load of all devices of a replica together."""
    load, layouts, count = (
        load_of(model),
        plan.layouts,
        plan.num_logical_devices,
    )
    trainable, *_ = grouped(model).values()
    whole = [
        variable
        for variable in trainable
        if layouts is None or not layouts.axes_of(variable.path, variable.shape)
    ]
    more = (count - 1) * _total(whole)
    return dataclasses.replace(load, trainable=load.trainable + more)


def kept_of(model: keras.Model) -> dict[str, Kept] | None:
    """Returns the bytes on each parameter device, if variables are central."""
    binding = bound(model)
    if binding is None or not binding.strategy.plan.parameter_devices:
        return None
    storage = binding.strategy.executor.storage
    trainable, frozen, *_ = grouped(model).values()
    kept = {}
    for device in binding.strategy.plan.parameter_devices:
        trained, others = (
            _total([v for v in variables if storage(v).devices == (device,)])
            for variables in (trainable, frozen)
        )
        kept[str(device)] = Kept(trained + others, trained)
    return kept


def rows_of(model: keras.Model) -> tuple[VariableRow, ...]:
    """Returns a row for each variable of a model."""
    binding = bound(model)
    if binding is None:
        kept = _kept_without_strategy()

        def kind(variable: keras.Variable) -> str:
            return "plain"

    else:
        storage, plan = binding.strategy.executor.storage, binding.strategy.plan

        def kept(variable: keras.Variable) -> dict[Device, int]:
            bytes_by_device: dict[Device, int] = storage(variable).bytes_kept()
            return bytes_by_device

        def kind(variable: keras.Variable) -> str:
            return _kind(plan, variable, storage(variable))

    return tuple(
        VariableRow(
            group,
            variable.path,
            tuple(variable.shape),
            keras.backend.standardize_dtype(variable.dtype),
            kind(variable),
            num_bytes(variable),
            tuple((str(name), n) for name, n in kept(variable).items()),
        )
        for group, variables in grouped(model).items()
        for variable in variables
    )


def _kind(plan: Plan, variable: keras.Variable, storage: Storage) -> str:
    if isinstance(variable, SyncOnReadVariable):
        return "on-read"
    if plan.parameter_devices:
        return "central"
    is_alone = plan.num_replicas == 1 and storage.kind == "mirrored"
    return "one copy" if is_alone else storage.kind


def _kept_without_strategy() -> Callable[[keras.Variable], dict[Device, int]]:
    """Returns a function that counts a plain variable as its storage does."""
    backend = get_backend()
    default = default_devices(backend.list_devices())[0]
    executor = backend.executor(Plan(((default,),), (default,)))

    def kept(variable: keras.Variable) -> dict[Device, int]:
        if not keras_internals.has_value(variable):
            return {default: num_bytes(variable)}
        devices = executor.storage(variable).devices
        if not devices:  # not on the plan's device
            value: Any = keras.ops.convert_to_tensor(variable)
            devices = (executor.device_of(value),)
        return dict.fromkeys(devices, num_bytes(variable))

    return kept

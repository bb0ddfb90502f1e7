"""Bytes of a model, on each device and sent in each step."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

# Bytes of one number of a variable under each dtype policy of Keras. Gradients
# and slots have the same type; mixed policies compute in another one.
VARIABLE_BYTES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "mixed_float16": 4,
    "mixed_bfloat16": 4,
}

# Slots with the shape of their variable that Keras' optimizers make by default.
# Adafactor and Muon are missing: their slots depend on the variables' shapes.
SLOTS = {
    "adadelta": 2,
    "adagrad": 1,
    "adam": 2,
    "adamax": 2,
    "adamw": 2,
    "ftrl": 2,
    "lamb": 2,
    "lion": 1,
    "nadam": 2,
    "rmsprop": 1,
    "schedulefreeadamw": 2,
    "sgd": 0,
}

# Bytes of the step counter and the learning rate.
_COUNTERS = 8
# Bytes of the loss-scaling optimizer around it for float16: a step counter and
# a learning rate of its own, the scale, and the steps since the scale changed.
_SCALING = 16


@dataclass(frozen=True)
class Flat:
    """Numbers of one type that can be split into parts anywhere."""

    length: int
    num_bytes: int

    def part(self, count: int) -> int:
        return math.ceil(self.length / count) * self.num_bytes


@dataclass(frozen=True)
class Load:
    """The bytes of a model's variables and of its optimizer's."""

    trainable: int  # gradients are as large
    frozen: int = 0
    slots: tuple[Flat, ...] = ()
    counters: int = 0  # the optimizer's other variables

    @property
    def weights(self) -> int:
        return self.trainable + self.frozen

    def optimizer(self, parts: int = 1) -> int:
        """Returns the optimizer's bytes where replicas split its slots."""
        return self.counters + sum(flat.part(parts) for flat in self.slots)


def load_of_parameters(
    num_parameters: int,
    dtype: str = "float32",
    optimizer: str = "adam",
    slots: int | None = None,
) -> Load:
    """Returns the load of a number of parameters, all of them trainable."""
    if dtype not in VARIABLE_BYTES:
        raise ValueError(
            "There is no dtype policy of that name. Received: "
            f"{dtype!r}. Expected: one of {', '.join(VARIABLE_BYTES)}."
        )
    name = optimizer.lower().replace("_", "").replace("-", "")
    if slots is None and name not in SLOTS:
        raise ValueError(
            f"The slots of this optimizer are not known. Received: "
            f"{optimizer!r}. Expected: one of {', '.join(SLOTS)}; or --slots, "
            "how many numbers it keeps for each parameter; or --model."
        )
    count = SLOTS[name] if slots is None else slots
    itemsize = VARIABLE_BYTES[dtype]
    scaling = _SCALING if dtype == "mixed_float16" else 0
    return Load(
        trainable=num_parameters * itemsize,
        slots=(Flat(num_parameters, itemsize),) * count,
        counters=_COUNTERS + scaling,
    )


# What is split over all replicas: an optimizer's slots, or all variables.
SLOTS_SPLIT = "optimizer"
ALL_SPLIT = "variables"


@dataclass(frozen=True)
class Placement:
    """The devices of a worker that compute, and those that keep variables."""

    devices: tuple[str, ...]
    parameter_devices: tuple[
        str, ...
    ] = ()  # of the only copy; else each device has one
    num_workers: int = 1
    split: str | None = None  # `SLOTS_SPLIT`, `ALL_SPLIT`, or nothing
    num_logical: int = 1  # devices of each replica

    @property
    def num_replicas(self) -> int:
        return len(self.devices) // self.num_logical * self.num_workers

    @property
    def all_devices(self) -> tuple[str, ...]:
        """A worker's devices: those that compute, then those that only keep."""
        return tuple(dict.fromkeys((*self.devices, *self.parameter_devices)))


@dataclass(frozen=True)
class Memory:
    """Bytes on one device; all but the first two exist in a step only."""

    parameters: int = 0
    optimizer: int = 0
    copies: int = 0  # of values that other devices keep, at most
    gradients: int = 0
    activations: int = 0

    @property
    def kept(self) -> int:
        """Bytes between steps."""
        return self.parameters + self.optimizer

    @property
    def most(self) -> int:
        """Bytes during a step."""
        return self.kept + self.copies + self.gradients + self.activations


def memory(
    load: Load, placement: Placement, activations: int = 0
) -> dict[str, Memory]:
    """Returns the memory of each device; equal parts on parameter devices."""
    parameter_devices = placement.parameter_devices
    if not parameter_devices:
        count = placement.num_replicas
        state = load.optimizer(count if placement.split else 1)
        device_memory = Memory(
            load.weights, state, 0, load.trainable, activations
        )
        if placement.split == ALL_SPLIT:
            part = math.ceil(load.weights / count)
            gradients = math.ceil(load.trainable / count)
            copies = load.weights - part
            device_memory = Memory(part, state, copies, gradients, activations)
        return dict.fromkeys(placement.devices, device_memory)
    result = {}
    for name in placement.all_devices:
        computes, keeps = name in placement.devices, name in parameter_devices
        share = 1 / len(parameter_devices) if keeps else 0.0
        result[name] = Memory(
            math.ceil(share * load.weights),
            math.ceil(share * load.optimizer()),
            math.floor((1 - share) * load.weights) if computes else 0,
            load.trainable if computes else math.ceil(share * load.trainable),
            activations if computes else 0,
        )
    return result


@dataclass(frozen=True)
class Kept:
    """Bytes of the variables that a parameter device keeps."""

    weights: int  # all of the model's variables
    trainable: int


@dataclass(frozen=True)
class Transfer:
    """One kind of traffic in a step.

    Args:
        what: Such as `"gradients, all-reduce"`.
        between: `"devices"` of a worker, or `"workers"`.
        sent: Pairs of a sender's name and its bytes.
        total: The bytes that all send, on all workers.
    """

    what: str
    between: str
    sent: tuple[tuple[str, int], ...]
    total: int


def transfers(
    load: Load,
    placement: Placement,
    kept: Mapping[str, Kept] | None = None,
) -> tuple[Transfer, ...]:
    """Returns the traffic of a step; `kept` `None` is equal parts.

    With several logical devices, the load is that of all of a replica's, each
    of which sums its own gradients with those of the other replicas'.
    """
    if placement.parameter_devices:
        local = _to_and_from_parameter_devices(load, placement, kept)
    else:
        local = _all_reduce(
            load.trainable, placement, placement.devices, "devices"
        )
    workers = tuple(f"worker {i}" for i in range(placement.num_workers))
    return (*local, *_all_reduce(load.trainable, placement, workers, "workers"))


def bytes_sent(
    load: Load, placement: Placement, kept: Mapping[str, Kept] | None = None
) -> int:
    return sum(transfer.total for transfer in transfers(load, placement, kept))


def _all_reduce(
    num_bytes: int,
    placement: Placement,
    names: tuple[str, ...],
    between: str,
) -> tuple[Transfer, ...]:
    is_local = between == "devices"
    count = len(names) // (placement.num_logical if is_local else 1)
    times = placement.num_workers if is_local else 1
    if count == 1:
        return ()
    # Computed from the whole, because each part is rounded up. With shards it
    # is the same, which JAX on CPU devices does not reach: there it is 1.5
    # times as much.
    total = 2 * (count - 1) * num_bytes
    kinds: tuple[str, ...] = ("gradients, all-reduce",)
    if placement.split:
        kinds = "gradients, reduce-scatter", "parameters, all-gather"
    per_device = math.ceil(total / len(kinds) / len(names))
    sent = tuple((name, per_device) for name in names)
    return tuple(
        Transfer(what, between, sent, times * total // len(kinds))
        for what in kinds
    )


def _to_and_from_parameter_devices(
    load: Load, placement: Placement, kept: Mapping[str, Kept] | None
) -> tuple[Transfer, ...]:
    devices, parameter_devices = placement.devices, placement.parameter_devices
    if kept is None:
        count = len(parameter_devices)
        part = Kept(
            math.ceil(load.weights / count), math.ceil(load.trainable / count)
        )
        kept = dict.fromkeys(parameter_devices, part)
    parameters = {
        name: part.weights * sum(device != name for device in devices)
        for name, part in kept.items()
    }
    gradients = {
        device: sum(
            part.trainable for name, part in kept.items() if name != device
        )
        for device in devices
    }
    return tuple(
        Transfer(
            what,
            "devices",
            tuple((name, sent) for name, sent in by_device.items() if sent),
            placement.num_workers * sum(by_device.values()),
        )
        for what, by_device in (
            ("parameters, to replicas", parameters),
            ("gradients, to parameters", gradients),
        )
        if any(by_device.values())
    )

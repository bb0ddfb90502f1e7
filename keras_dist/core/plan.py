"""Plan: which devices compute, and where each variable lives."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import numpy as np

from keras_dist.core.device import Device
from keras_dist.core.record import VariableRecord
from keras_dist.core.variable_layouts import VariableLayouts


@dataclass(frozen=True)
class Cluster:
    """The workers that train together, and this process' position.

    Args:
        index: Integer, this worker's position; 0 is the chief.
        leader: String, `"host:port"` on the chief's host, where workers meet.
        addresses: Tuple of strings, each worker's own `"host:port"` in order;
            empty where the launcher does not tell it.
        coordinator: String, `"host:port"` of a service outside of the workers
            that outlives each of them, or `None`. `keras-dist run` starts one
            if the backend supports it.
        restarts: Integer, number of times that the group was restarted.
        job: String, a word that all workers of one start have in common, and
            workers of other jobs do not; empty if the launcher has none. Then
            the addresses stand for it.
    """

    index: int
    leader: str
    addresses: tuple[str, ...]
    coordinator: str | None = None
    restarts: int = 0
    job: str = ""

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return len(self.addresses)

    @property
    def is_chief(self) -> bool:
        """True for worker 0, which shows progress and writes files."""
        return self.index == 0


@dataclass(frozen=True)
class Plan:
    """The devices that compute, and the devices that hold variables.

    A strategy builds a plan; an executor is bound to one plan and reads
    nothing else of the strategy.

    Args:
        replicas: Tuple with, for each replica of this worker, the tuple of
            its logical devices, as many for each. All workers have the same
            number of replicas.
        variable_devices: Tuple of this worker's devices that hold variables.
            The first is the primary device, whose copy is saved.
        cluster: `Cluster` of the workers, or `None` for a single worker.
        is_central: Boolean, true if each variable has a single copy, on one
            of `variable_devices`, which every replica reads.
        shards_optimizer: Boolean, true if each replica keeps only its shard
            of the optimizer's state.
        shards_variables: Boolean, true if each replica keeps only its shard
            of each large variable, those of optimizers included.
        layouts: `VariableLayouts`, the variables that the logical devices of
            a replica divide, or `None` if there are none.
    """

    replicas: tuple[tuple[Device, ...], ...]
    variable_devices: tuple[Device, ...]
    cluster: Cluster | None = None
    is_central: bool = False
    shards_optimizer: bool = False
    shards_variables: bool = False
    layouts: VariableLayouts | None = None

    @cached_property
    def is_one_device(self) -> bool:
        """True if the only replica computes where the variables are."""
        return self.num_replicas == 1 and self.variable_devices == self.devices

    @cached_property
    def num_workers(self) -> int:
        """Number of workers."""
        return 1 if self.cluster is None else self.cluster.num_workers

    @cached_property
    def num_local_replicas(self) -> int:
        """Number of replicas of this worker."""
        return len(self.replicas)

    @cached_property
    def num_replicas(self) -> int:
        """Number of replicas of all workers."""
        return len(self.replicas) * self.num_workers

    @cached_property
    def first_replica(self) -> int:
        """Position of this worker's first replica among all replicas."""
        index = 0 if self.cluster is None else self.cluster.index
        return index * len(self.replicas)

    @property
    def is_chief(self) -> bool:
        """True on the worker that shows progress and writes files."""
        return self.cluster is None or self.cluster.is_chief

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The first logical device of each replica of this worker, in order."""
        return tuple(replica[0] for replica in self.replicas)

    @property
    def all_devices(self) -> tuple[Device, ...]:
        """All logical devices of each replica of this worker, in order."""
        return tuple(device for devices in self.replicas for device in devices)

    @property
    def num_logical_devices(self) -> int:
        """Number of logical devices of each replica."""
        return len(self.replicas[0])

    @property
    def primary(self) -> Device:
        """The device whose copy of a variable is read and saved."""
        return self.variable_devices[0]

    @property
    def parameter_devices(self) -> tuple[Device, ...]:
        """The devices of variables with a single copy; else empty."""
        return self.variable_devices if self.is_central else ()

    @property
    def shards(self) -> bool:
        """True if each replica keeps only its shard of some variables."""
        is_asked = self.shards_optimizer or self.shards_variables
        return is_asked and self.num_replicas > 1

    def __str__(self) -> str:
        """Returns the devices, and the ways of storage that are not usual."""
        text = ", ".join(
            "+".join(map(str, devices)) for devices in self.replicas
        )
        if self.shards_variables:
            text += ", with sharded variables"
        elif self.shards_optimizer:
            text += ", with a sharded optimizer state"
        if self.parameter_devices:
            names = ", ".join(map(str, self.parameter_devices))
            text += f", variables on {names}"
        if self.cluster is not None:
            text += f" of worker {self.cluster.index} of {self.num_workers}"
        return text


class Owners:
    """The device of each single-copy variable, balanced by bytes.

    A variable goes to the first device among those with the fewest bytes, so
    that the same program places it alike each time. A variable that is created
    for another one, such as an optimizer's slot, goes to the same device.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._num_bytes = dict.fromkeys(devices, 0)

    def of(self, variable: keras.Variable) -> Device:
        """Returns a variable's device; the first one until it has a shape."""
        device: Device | None = VariableRecord.of(variable).owner
        if device in self._num_bytes:
            return device
        first = next(iter(self._num_bytes))
        has_shape = None not in _shape(variable)
        if len(self._num_bytes) == 1 or not has_shape:
            return first
        device = min(self._num_bytes, key=lambda d: self._num_bytes[d])
        return self._give(variable, device)

    def _give(self, variable: keras.Variable, device: Device) -> Device:
        VariableRecord.of(variable).owner = device
        self._num_bytes[device] += num_bytes(variable)
        return device

    def keep_together(
        self, variable: keras.Variable, reference: keras.Variable
    ) -> None:
        """Gives a new variable the device of a reference variable."""
        self._give(variable, self.of(reference))


def num_bytes(variable: keras.Variable) -> int:
    """Returns the size of a variable's value in bytes."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    bits = 16 if dtype == "bfloat16" else 8 * np.dtype(dtype).itemsize
    return int(np.prod(_shape(variable), dtype=np.int64)) * bits // 8


def _shape(variable: keras.Variable) -> tuple[Any, ...]:
    shape = variable.shape
    return (None,) if shape is None else tuple(shape)

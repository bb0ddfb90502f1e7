"""Placements of variables and replicas, and the memory that they take."""

import math
from dataclasses import dataclass

from keras_dist.planning.load import Load


@dataclass(frozen=True)
class Placement:
    """The devices that keep variables, and those that compute.

    Args:
        devices: Names of a worker's devices that compute.
        keepers: Names of a worker's parameter devices, where each variable has
            its only copy; empty if each device has a copy.
        num_workers: Workers that all have such devices.
        is_sharded: Whether slots are split over all replicas.
    """

    devices: tuple[str, ...]
    keepers: tuple[str, ...] = ()
    num_workers: int = 1
    is_sharded: bool = False

    @property
    def num_replicas(self) -> int:
        """The number of replicas on all workers."""
        return len(self.devices) * self.num_workers

    @property
    def all_devices(self) -> tuple[str, ...]:
        """A worker's devices: those that compute, then those that only keep."""
        return tuple(dict.fromkeys((*self.devices, *self.keepers)))


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    `copies` are of values that other devices keep. They, `gradients` and
    `activations` exist during a step only.
    """

    parameters: int = 0
    optimizer: int = 0
    copies: int = 0
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
    """Returns the memory of each device of a worker.

    Several parameter devices are assumed to keep equal parts. `activations` are
    bytes for each replica.
    """
    keepers = placement.keepers
    if not keepers:
        parts = placement.num_replicas if placement.is_sharded else 1
        each = Memory(
            load.weights,
            load.optimizer(parts),
            0,
            load.trainable,
            activations,
        )
        return dict.fromkeys(placement.devices, each)
    result = {}
    for name in placement.all_devices:
        computes, keeps = name in placement.devices, name in keepers
        own = 1 / len(keepers) if keeps else 0.0
        result[name] = Memory(
            math.ceil(own * load.weights),
            math.ceil(own * load.optimizer()),
            math.floor((1 - own) * load.weights) if computes else 0,
            load.trainable if computes else math.ceil(own * load.trainable),
            activations if computes else 0,
        )
    return result

"""Where it is trained, and what devices hold then."""

import math
from dataclasses import dataclass

from keras_dist_cli.planning.load import Load


@dataclass(frozen=True)
class Placement:
    """Where variables are, and where a step computes.

    Args:
        devices: Tuple of the names of a worker's devices that compute.
        keepers: Tuple of the names of its parameter devices, where each
            variable has one copy only; empty if each device has one.
        num_workers: Integer, how many workers do the same.
        is_sharded: Boolean, whether slots are cut over all replicas.
    """

    devices: tuple[str, ...]
    keepers: tuple[str, ...] = ()
    num_workers: int = 1
    is_sharded: bool = False

    @property
    def num_replicas(self) -> int:
        """Over all workers."""
        return len(self.devices) * self.num_workers

    @property
    def all_devices(self) -> tuple[str, ...]:
        """Of a worker: those that compute, and then those that only keep."""
        return tuple(dict.fromkeys((*self.devices, *self.keepers)))


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Args:
        parameters: Integer, of the model's variables.
        optimizer: Integer, of the optimizer's variables.
        copies: Integer, of values that other devices keep, in a step.
        gradients: Integer, in a step.
        activations: Integer, in a step, as far as they are known.
    """

    parameters: int = 0
    optimizer: int = 0
    copies: int = 0
    gradients: int = 0
    activations: int = 0

    @property
    def kept(self) -> int:
        """Between steps."""
        return self.parameters + self.optimizer

    @property
    def most(self) -> int:
        """In a step."""
        return self.kept + self.copies + self.gradients + self.activations


def memory(
    load: Load, placement: Placement, activations: int = 0
) -> dict[str, Memory]:
    """What each device of a worker holds.

    Several parameter devices are taken to keep equal parts.

    Args:
        load: `Load`.
        placement: `Placement`.
        activations: Integer, bytes of a replica's activations in a step.
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

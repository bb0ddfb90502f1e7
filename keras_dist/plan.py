"""Plan: what a strategy decides, as data."""

from dataclasses import dataclass

from keras_dist.device import Device


@dataclass(frozen=True)
class Plan:
    """Which devices compute, and where variables live.

    A strategy builds one; an executor is bound to one and reads nothing else.

    Args:
        replicas: Tuple with, for each replica, the tuple of its logical
            devices (one, until a strategy splits a replica over several).
        variable_devices: Tuple of the devices that hold a copy of each
            variable. The first is the primary: its copy is the one saved.
    """

    replicas: tuple[tuple[Device, ...], ...]
    variable_devices: tuple[Device, ...]

    @property
    def num_replicas(self) -> int:
        """Number of replicas, over all workers."""
        return len(self.replicas)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The first logical device of each replica, in replica order."""
        return tuple(replica[0] for replica in self.replicas)

    @property
    def primary(self) -> Device:
        """The device whose copy of a variable is read and saved."""
        return self.variable_devices[0]

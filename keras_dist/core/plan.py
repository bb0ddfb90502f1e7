"""Plan: what a strategy decides, as data."""

from dataclasses import dataclass

from keras_dist.core.cluster import Cluster
from keras_dist.core.device import Device


@dataclass(frozen=True)
class Plan:
    """Which devices compute, and where variables live.

    A strategy builds one; an executor is bound to one and reads nothing else.

    Args:
        replicas: Tuple with, for each replica of this worker, the tuple of
            its logical devices (one, until a strategy splits a replica over
            several). Each worker has as many.
        variable_devices: Tuple of this worker's devices that hold a copy of
            each variable. The first is the primary: its copy is the one
            saved.
        cluster: `Cluster`, the workers that do the same, or `None` where
            there is only one.
        is_central: Boolean, whether a variable has one copy only, on one of
            `variable_devices`, from where each replica reads it.
        shards_optimizer: Boolean, whether each replica keeps only its part of
            the optimizer's state.
    """

    replicas: tuple[tuple[Device, ...], ...]
    variable_devices: tuple[Device, ...]
    cluster: Cluster | None = None
    is_central: bool = False
    shards_optimizer: bool = False

    @property
    def is_one_device(self) -> bool:
        """Whether there is nothing to move: variables are where they are used.

        True of one replica that has the variables.
        """
        return self.num_replicas == 1 and self.variable_devices == self.devices

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return 1 if self.cluster is None else self.cluster.num_workers

    @property
    def num_local_replicas(self) -> int:
        """Number of replicas of this worker."""
        return len(self.replicas)

    @property
    def num_replicas(self) -> int:
        """Number of replicas, over all workers."""
        return len(self.replicas) * self.num_workers

    @property
    def first_replica(self) -> int:
        """The position, among all replicas, of this worker's first one."""
        index = 0 if self.cluster is None else self.cluster.index
        return index * len(self.replicas)

    @property
    def is_chief(self) -> bool:
        """Whether this worker shows progress, and writes files."""
        return self.cluster is None or self.cluster.is_chief

    @property
    def devices(self) -> tuple[Device, ...]:
        """The first logical device of each replica of this worker, in order."""
        return tuple(replica[0] for replica in self.replicas)

    @property
    def primary(self) -> Device:
        """The device whose copy of a variable is read and saved."""
        return self.variable_devices[0]

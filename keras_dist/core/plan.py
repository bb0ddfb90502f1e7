"""Plan: a strategy's devices and the places of its variables."""

from dataclasses import dataclass

from keras_dist.core.cluster import Cluster
from keras_dist.core.device import Device


@dataclass(frozen=True)
class Plan:
    """The devices that compute, and the devices that hold variables.

    A strategy builds a plan; an executor is bound to one plan and reads
    nothing else of the strategy.

    Args:
        replicas: Tuple with, for each replica of this worker, the tuple of
            its logical devices. At present a replica has one logical device.
            All workers have the same number of replicas.
        variable_devices: Tuple of this worker's devices that hold variables.
            The first is the primary device, whose copy is saved.
        cluster: `Cluster` of the workers, or `None` for a single worker.
        is_central: Boolean, true if each variable has a single copy, on one
            of `variable_devices`, which every replica reads.
        shards_optimizer: Boolean, true if each replica keeps only its shard
            of the optimizer's state.
    """

    replicas: tuple[tuple[Device, ...], ...]
    variable_devices: tuple[Device, ...]
    cluster: Cluster | None = None
    is_central: bool = False
    shards_optimizer: bool = False

    @property
    def is_one_device(self) -> bool:
        """True if the only replica computes where the variables are."""
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
        """Number of replicas of all workers."""
        return len(self.replicas) * self.num_workers

    @property
    def first_replica(self) -> int:
        """Position of this worker's first replica among all replicas."""
        index = 0 if self.cluster is None else self.cluster.index
        return index * len(self.replicas)

    @property
    def is_chief(self) -> bool:
        """True on the worker that shows progress and writes files."""
        return self.cluster is None or self.cluster.is_chief

    @property
    def devices(self) -> tuple[Device, ...]:
        """The first logical device of each replica of this worker, in order."""
        return tuple(replica[0] for replica in self.replicas)

    @property
    def primary(self) -> Device:
        """The device whose copy of a variable is read and saved."""
        return self.variable_devices[0]

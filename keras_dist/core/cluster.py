"""Cluster: the workers of a job and this worker's place among them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """The workers that train together, and this process' position.

    Args:
        index: Integer, this worker's position; 0 is the chief.
        leader: String, `"host:port"` on the chief's host, the address of the
            rendezvous.
        addresses: Tuple of strings, each worker's own `"host:port"` in order.
        coordinator: String, `"host:port"` of a service outside of the workers
            that outlives each of them, or `None`. `keras-dist run` starts one
            where the backend supports it.
        restarts: Integer, number of times that the group was restarted.

    Example:

    >>> from keras_dist.core.cluster import Cluster
    >>> addresses = ("10.0.0.1:9000", "10.0.0.2:9000")
    >>> cluster = Cluster(1, leader=addresses[0], addresses=addresses)
    >>> cluster.num_workers, cluster.is_chief
    (2, False)
    """

    index: int
    leader: str
    addresses: tuple[str, ...]
    coordinator: str | None = None
    restarts: int = 0

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return len(self.addresses)

    @property
    def is_chief(self) -> bool:
        """True for worker 0, which shows progress and writes files."""
        return self.index == 0

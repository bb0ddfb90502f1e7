"""Cluster: the workers of a job, as one of them sees them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """The workers that train together, and which of them this process is.

    Args:
        index: Integer, this worker's position; 0 is the chief.
        leader: String, `"host:port"` on the chief's host, where workers meet
            to begin with.
        addresses: Tuple of strings, each worker's own `"host:port"` in order.
        coordinator: String, `"host:port"` of a service outside of the workers
            that outlives each of them, as `keras-dist run` starts it where
            the backend has one; or `None`.
        restarts: Integer, how often the group has been started again.

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
        """How many workers there are."""
        return len(self.addresses)

    @property
    def is_chief(self) -> bool:
        """Whether this worker shows progress, and writes files."""
        return self.index == 0

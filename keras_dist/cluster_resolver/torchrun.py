"""TorchrunClusterResolver: the workers of a torchrun job."""

from keras_dist.cluster_resolver.environment import WorkersResolver
from keras_dist.cluster_resolver.environment import host_port
from keras_dist.cluster_resolver.environment import integer
from keras_dist.cluster_resolver.environment import rank_below
from keras_dist.cluster_resolver.environment import required

_SET_BY = "torchrun"


class TorchrunClusterResolver(WorkersResolver):
    """A resolver for workers that torchrun started, on any backend.

    It reads the environment variables `RANK`, `WORLD_SIZE`,
    `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` and
    `TORCHELASTIC_RESTART_COUNT`. torchrun itself listens at `MASTER_PORT`, so
    worker `i` is given port `MASTER_PORT + 1 + i`. With several hosts, only
    the first worker's host is known, and the other addresses are empty.

    Raises:
        ClusterError: From methods that need a variable that is absent or
            can't be read.

    Example:

    >>> from keras_dist.cluster_resolver import TorchrunClusterResolver
    >>> resolver = TorchrunClusterResolver.reading({
    ...     "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
    ...     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
    ... })
    >>> resolver.cluster_spec()
    ClusterSpec({'worker': ['127.0.0.1:29501', '127.0.0.1:29502']})
    """

    def addresses(self) -> list[str]:
        """Returns the workers' addresses, empty where they are unknown."""
        _, number = self._place()
        host = required(self._environ, "MASTER_ADDR", _SET_BY)
        port = integer(self._environ, "MASTER_PORT", _SET_BY, 1, 65535)
        known = number if self._on_one_host(number) else 1
        addresses = [
            host_port(
                host, port + 1 + i, f"MASTER_PORT={port} with {number} workers"
            )
            for i in range(known)
        ]
        return addresses + [""] * (number - known)

    def index(self) -> int:
        """Returns this worker's rank."""
        return self._place()[0]

    @property
    def restarts(self) -> int:
        """Number of times that torchrun restarted the workers."""
        name = "TORCHELASTIC_RESTART_COUNT"
        if not self._environ.get(name):
            return 0
        return integer(self._environ, name, _SET_BY)

    def _place(self) -> tuple[int, int]:
        return rank_below(self._environ, "RANK", "WORLD_SIZE", _SET_BY)

    def _on_one_host(self, number: int) -> bool:
        return self._environ.get("LOCAL_WORLD_SIZE") == str(number)

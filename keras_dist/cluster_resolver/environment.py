"""Base classes and helpers of resolvers that read environment variables."""

import os
from abc import abstractmethod
from collections.abc import Mapping
from collections.abc import MutableMapping
from typing import Self

from keras_dist.cluster_resolver.base import ClusterResolver
from keras_dist.cluster_resolver.spec import ClusterSpec
from keras_dist.errors import ClusterError


class EnvironmentResolver(ClusterResolver):
    """A resolver that reads environment variables."""

    _environ: MutableMapping[str, str] = os.environ

    @classmethod
    def reading(cls, environ: MutableMapping[str, str]) -> Self:
        """Creates a resolver, without arguments, that reads other variables.

        Args:
            environ: Dict of strings to read in place of `os.environ`.

        Example:

        >>> from keras_dist.cluster_resolver import KerasDistClusterResolver
        >>> resolver = KerasDistClusterResolver.reading({
        ...     "KERAS_DIST_WORKERS": "10.0.0.1:9000,10.0.0.2:9000",
        ...     "KERAS_DIST_WORKER_INDEX": "1",
        ... })
        >>> resolver.master()
        '10.0.0.2:9000'
        """
        resolver = cls.__new__(cls)
        if environ is not os.environ:
            resolver._environ = environ
        cls.__init__(resolver)
        return resolver


class WorkersResolver(EnvironmentResolver):
    """A resolver for numbered workers, the tasks of one job, `worker`."""

    def cluster_spec(self) -> ClusterSpec:
        """Returns the workers, as the job `worker`."""
        return ClusterSpec({"worker": self.addresses()})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, by default this process' task."""
        return self.address_of(task_type, task_id, rpc_layer)

    def own_task(self) -> tuple[str | None, int | None]:
        """Returns `"worker"` and this worker's position."""
        return "worker", self.index()

    @abstractmethod
    def addresses(self) -> list[str]:
        """Returns each worker's `"host:port"` in order, empty if unknown."""

    @abstractmethod
    def index(self) -> int:
        """Returns this worker's position."""


def required(environ: Mapping[str, str], name: str, set_by: str) -> str:
    """Returns a required environment variable.

    Raises `ClusterError` if it is absent or empty. The message says that
    `set_by` sets the variable.
    """
    value = environ.get(name, "").strip()
    if not value:
        raise ClusterError(
            f"The environment variable {name} is not set. Expected: it is set "
            f"by {set_by}."
        )
    return value


def integer(
    environ: Mapping[str, str],
    name: str,
    set_by: str,
    low: int = 0,
    high: int | None = None,
) -> int:
    """Returns a required environment variable as an integer.

    Raises `ClusterError` if it is absent, no integer, or not between `low` and
    `high`.
    """
    value = required(environ, name, set_by)
    if not value.isdecimal() or not low <= int(value) <= (
        int(value) if high is None else high
    ):
        limits = f"of at least {low}" if high is None else f"of {low} to {high}"
        raise ClusterError(
            f"The environment variable {name} must be an integer {limits}. "
            f"Received: {value!r}."
        )
    return int(value)


def rank_below(
    environ: Mapping[str, str], rank: str, size: str, set_by: str
) -> tuple[int, int]:
    """Returns a rank and the number of ranks, from two variables.

    Raises `ClusterError` if one is absent or no integer, or if the rank is too
    large.
    """
    number = integer(environ, size, set_by, low=1)
    index = integer(environ, rank, set_by)
    if index >= number:
        raise ClusterError(
            f"{rank}={index} does not fit {size}={number}. Expected: a rank of "
            f"0 to {number - 1}."
        )
    return index, number


def host_port(host: str, port: int, ports: str) -> str:
    """Returns the address `"host:port"`, with brackets for IPv6.

    Raises `ClusterError` for a port outside of 1 to 65535. `ports` says in the
    message where the port comes from.
    """
    if not 0 < port < 65536:
        raise ClusterError(
            f"{ports} leads to port {port}, but ports end at 65535. Choose a "
            "smaller one."
        )
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"{host}:{port}"

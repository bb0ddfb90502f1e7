"""Resolvers that read environment variables, and how they read them."""

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
        """A resolver with its default arguments that reads other variables.

        Args:
            environ: Dict of strings, in place of `os.environ`.

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
    """Workers that a launcher has numbered: tasks of one job, `worker`."""

    def cluster_spec(self) -> ClusterSpec:
        """The workers, as the job `worker`."""
        return ClusterSpec({"worker": self.addresses()})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """This worker's address, or that of the task that is asked for."""
        return self.address_of(task_type, task_id, rpc_layer)

    def own_task(self) -> tuple[str | None, int | None]:
        """`"worker"`, and this worker's position."""
        return "worker", self.index()

    @abstractmethod
    def addresses(self) -> list[str]:
        """Each worker's `"host:port"` in order; empty where it is unknown."""

    @abstractmethod
    def index(self) -> int:
        """This worker's position."""


def required(environ: Mapping[str, str], name: str, set_by: str) -> str:
    """A variable that has to be there.

    Args:
        environ: Dict of strings.
        name: String, the variable.
        set_by: String, who sets it, for the message.

    Raises:
        ClusterError: If it is absent or empty.
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
    """A variable that has to be an integer.

    Args:
        environ: Dict of strings.
        name: String, the variable.
        set_by: String, who sets it, for the message.
        low: Integer, the least that it can be.
        high: Integer, the most that it can be, or `None`.

    Raises:
        ClusterError: If it is absent or something else.
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
    """A rank and how many there are, as two variables say.

    Raises:
        ClusterError: If one is absent, no integer, or the rank too large.
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
    """An address.

    Args:
        host: String, a name or an address; of IPv6 with or without brackets.
        port: Integer.
        ports: String, where the port comes from, for the message.

    Raises:
        ClusterError: If there is no such port.
    """
    if not 0 < port < 65536:
        raise ClusterError(
            f"{ports} leads to port {port}, but ports end at 65535. Choose a "
            "smaller one."
        )
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"{host}:{port}"

"""Base classes and helpers of resolvers that read environment variables."""

import json
import os
from abc import abstractmethod
from collections.abc import Mapping
from collections.abc import MutableMapping
from typing import Any
from typing import Self

from keras_dist.cluster_resolver.base import AddressResolver
from keras_dist.cluster_resolver.spec import ClusterSpec
from keras_dist.errors import ClusterError


class EnvironmentResolver(AddressResolver):
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

    def own_task(self) -> tuple[str | None, int | None]:
        """Returns `"worker"` and this worker's position."""
        return "worker", self.index()

    def _count(self, name: str, set_by: str) -> int:
        """Returns the integer in a variable, 0 if it is not set."""
        if not self._environ.get(name):
            return 0
        return integer(self._environ, name, set_by)

    @abstractmethod
    def addresses(self) -> list[str]:
        """Returns each worker's `"host:port"` in order, empty if unknown."""

    @abstractmethod
    def index(self) -> int:
        """Returns this worker's position."""


def required(environ: Mapping[str, str], name: str, set_by: str) -> str:
    """Returns a required environment variable, which `set_by` sets."""
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
    """Returns a required environment variable as an integer."""
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
    """Returns a rank and the number of ranks, from two variables."""
    number = integer(environ, size, set_by, low=1)
    index = integer(environ, rank, set_by)
    if index >= number:
        raise ClusterError(
            f"{rank}={index} does not fit {size}={number}. Expected: a rank of "
            f"0 to {number - 1}."
        )
    return index, number


def host_port(host: str, port: int, ports: str) -> str:
    """Returns `"host:port"`; an error says that `ports` led to the port."""
    if not 0 < port < 65536:
        raise ClusterError(
            f"{ports} leads to port {port}, but ports end at 65535. Choose a "
            "smaller one."
        )
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"{host}:{port}"


VARIABLE = "TF_CONFIG"


class TFConfigClusterResolver(EnvironmentResolver):
    """A resolver for the cluster in TF_CONFIG, on any backend.

    The environment variable TF_CONFIG is JSON, such as `{"cluster": {"worker":
    ["10.0.0.1:9000", "10.0.0.2:9000"]}, "task": {"type": "worker", "index":
    0}}`. Each call of a method reads it anew.

    Args:
        task_type: String, in place of the task's type in TF_CONFIG.
        task_id: Integer, in place of the task's index in TF_CONFIG.
        rpc_layer: String, in place of `rpc_layer` in TF_CONFIG.
        environment: String, the value of the property `environment`.

    Raises:
        ClusterError: From methods that need a part of TF_CONFIG that is absent
            or can't be read.

    Example:

    >>> import json
    >>> from keras_dist.cluster_resolver import TFConfigClusterResolver
    >>> resolver = TFConfigClusterResolver.reading({"TF_CONFIG": json.dumps({
    ...     "cluster": {"worker": ["10.0.0.1:9000", "10.0.0.2:9000"]},
    ...     "task": {"type": "worker", "index": 1},
    ... })})
    >>> resolver.master()
    '10.0.0.2:9000'
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self.task_type = task_type
        self.task_id = task_id
        self.rpc_layer = rpc_layer
        self._environment = environment

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster; empty if TF_CONFIG has none."""
        cluster = self._part("cluster")
        try:
            return ClusterSpec(cluster)
        except TypeError as error:
            raise ClusterError(
                f"The cluster in {VARIABLE} can't be read: {error}"
            ) from error

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns a task's address; empty with one task or none.

        `session_master` in TF_CONFIG takes precedence.
        """
        config = self._config()
        if config.get("session_master") is not None:
            return str(config["session_master"])
        spec = self.cluster_spec()
        if sum(map(spec.num_tasks, spec.jobs)) <= 1 and len(spec.jobs) <= 1:
            return ""
        address = spec.task_address(
            self.task_type if task_type is None else task_type,
            self.task_id if task_id is None else task_id,
        )
        return self.with_protocol(address, rpc_layer)

    @property
    def environment(self) -> str | None:
        """The given environment."""
        return self._environment

    def own_task(self) -> tuple[str | None, int | None]:
        """Returns the type and index of the task in TF_CONFIG."""
        task = self._part("task")
        task_type, index = task.get("type"), task.get("index")
        try:
            return (
                None if task_type is None else str(task_type),
                None if index is None else int(index),
            )
        except (TypeError, ValueError) as error:
            raise ClusterError(
                f"The index of the task in {VARIABLE} must be an integer. "
                f"Received: {index!r}."
            ) from error

    def own_rpc_layer(self) -> str | None:
        """Returns the protocol in TF_CONFIG."""
        layer = self._config().get("rpc_layer")
        return None if layer is None else str(layer)

    def _part(self, name: str) -> dict[str, Any]:
        part = self._config().get(name)
        if part is None:
            return {}
        if not isinstance(part, dict):
            raise ClusterError(
                f"{name!r} in {VARIABLE} must be an object. Received: {part!r}."
            )
        return part

    def _config(self) -> dict[str, Any]:
        value = self._environ.get(VARIABLE, "").strip()
        try:
            config = json.loads(value or "{}")
        except json.JSONDecodeError as error:
            raise ClusterError(
                f"The environment variable {VARIABLE} is not JSON: {error}. "
                f"Received: {value!r}."
            ) from error
        if not isinstance(config, dict):
            raise ClusterError(
                f"The environment variable {VARIABLE} must be a JSON object "
                f"with 'cluster' and 'task'. Received: {value!r}."
            )
        return config


_BY_TORCHRUN = "torchrun"


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
        host = required(self._environ, "MASTER_ADDR", _BY_TORCHRUN)
        port = integer(self._environ, "MASTER_PORT", _BY_TORCHRUN, 1, 65535)
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
        return self._count("TORCHELASTIC_RESTART_COUNT", _BY_TORCHRUN)

    def _place(self) -> tuple[int, int]:
        return rank_below(self._environ, "RANK", "WORLD_SIZE", _BY_TORCHRUN)

    def _on_one_host(self, number: int) -> bool:
        return self._environ.get("LOCAL_WORLD_SIZE") == str(number)


WORKERS = "KERAS_DIST_WORKERS"
INDEX = "KERAS_DIST_WORKER_INDEX"
COORDINATOR = "KERAS_DIST_COORDINATOR"
RESTARTS = "KERAS_DIST_RESTARTS"
_BY_KERAS_DIST = (
    "`keras-dist run`; where you start workers yourself, set "
    f"{WORKERS}=host:port,host:port and {INDEX}=0, 1, ..."
)


class KerasDistClusterResolver(WorkersResolver):
    """A resolver for workers that `keras-dist run` started.

    The environment variable `KERAS_DIST_WORKERS` has all workers' addresses,
    separated by commas and chief first; `KERAS_DIST_WORKER_INDEX` is this
    worker's position. `KERAS_DIST_COORDINATOR`, if set, is the address of the
    rendezvous. `KERAS_DIST_RESTARTS` is the number of times that the workers
    were restarted.

    Raises:
        ClusterError: From methods that need a variable that is absent or
            can't be read.

    Example:

    >>> from keras_dist.cluster_resolver import KerasDistClusterResolver
    >>> resolver = KerasDistClusterResolver.reading({
    ...     "KERAS_DIST_WORKERS": "10.0.0.1:9000,10.0.0.2:9000",
    ...     "KERAS_DIST_WORKER_INDEX": "0",
    ... })
    >>> resolver.task_type, resolver.task_id
    ('worker', 0)
    """

    def addresses(self) -> list[str]:
        """Returns the workers' addresses."""
        value = required(self._environ, WORKERS, _BY_KERAS_DIST)
        addresses = [address.strip() for address in value.split(",")]
        if not all(addresses):
            raise ClusterError(
                f"{WORKERS} must be addresses 'host:port', separated by "
                f"commas. Received: {value!r}."
            )
        return addresses

    def index(self) -> int:
        """Returns this worker's position."""
        index = integer(self._environ, INDEX, _BY_KERAS_DIST)
        number = len(self.addresses())
        if index >= number:
            raise ClusterError(
                f"{INDEX}={index} does not fit {WORKERS}, which names {number} "
                f"workers. Expected: 0 to {number - 1}."
            )
        return index

    @property
    def coordinator(self) -> str | None:
        """The address in `KERAS_DIST_COORDINATOR`; `None` if it is not set."""
        return self._environ.get(COORDINATOR, "").strip() or None

    @property
    def restarts(self) -> int:
        """The number in `KERAS_DIST_RESTARTS`; 0 if it is not set."""
        return self._count(RESTARTS, _BY_KERAS_DIST)

"""Reading environment variables, and the resolver of TF_CONFIG."""

import contextlib
import json
import math
import os
from abc import abstractmethod
from collections.abc import Mapping
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any
from typing import Self

from keras_dist.cluster_resolver.base import ClusterResolver
from keras_dist.cluster_resolver.spec import ClusterSpec
from keras_dist.cluster_resolver.tasks import cluster_of
from keras_dist.errors import ClusterError

# Below Linux's ephemeral ports, which begin at 32768, and below torchrun's own
# ports, which are 29400 and 29500 by default.
_FIRST_PORT, _NUM_PORTS = 10240, 16384


@dataclass(frozen=True)
class Place:
    """A process' position among the workers that a launcher started."""

    index: int
    number: int
    role: str = ""

    def __str__(self) -> str:
        number = "1 worker" if self.number == 1 else f"{self.number} workers"
        return self.role or f"{number}, this is worker {self.index}"


class EnvironmentResolver(ClusterResolver):
    """A resolver that reads environment variables, which a launcher sets."""

    _environ: MutableMapping[str, str] = os.environ

    @classmethod
    @abstractmethod
    def _evidence(cls, environ: MutableMapping[str, str]) -> str:
        """Returns how the launcher is recognized, "" without it."""

    @classmethod
    @abstractmethod
    def _place(cls, environ: MutableMapping[str, str]) -> Place:
        """Returns this process' place among the launcher's workers."""

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
    high: float = math.inf,
) -> int:
    """Returns a required environment variable as an integer."""
    value = required(environ, name, set_by)
    if not value.isdecimal() or not low <= int(value) <= high:
        limits = f"of {low} to {high}"
        if high == math.inf:
            limits = f"of at least {low}"
        raise ClusterError(
            f"The environment variable {name} must be an integer {limits}. "
            f"Received: {value!r}."
        )
    return int(value)


def json_in(environ: Mapping[str, str], name: str) -> Any:
    """Returns the JSON in an environment variable, `{}` if it is not set."""
    value = environ.get(name, "").strip()
    try:
        return json.loads(value or "{}")
    except json.JSONDecodeError as error:
        raise ClusterError(
            f"The environment variable {name} is not JSON: {error}. "
            f"Received: {value!r}."
        ) from error


def rank_below(
    environ: Mapping[str, str], rank: str, size: str, set_by: str
) -> Place:
    """Returns the place of a process from its rank and the number of ranks."""
    number = integer(environ, size, set_by, low=1)
    index = integer(environ, rank, set_by)
    if index >= number:
        raise ClusterError(
            f"{rank}={index} does not fit {size}={number}. Expected: a rank of "
            f"0 to {number - 1}."
        )
    return Place(index, number)


def job_port(number: int, count: int) -> int:
    """Returns the first of `count` ports in a row for a job with a number.

    Jobs with as many ports and with numbers near each other share none.
    """
    width = 1 << (count - 1).bit_length()
    return _FIRST_PORT + number % max(1, _NUM_PORTS // width) * width


def host_port(host: str, port: int, ports: str) -> str:
    """Returns `"host:port"`; an error says that `ports` led to the port."""
    if not 0 < port < 65536:
        raise ClusterError(
            f"{ports} leads to port {port}, but the largest port is 65535. "
            "Choose a smaller port."
        )
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"{host}:{port}"


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

    @classmethod
    def _evidence(cls, environ: MutableMapping[str, str]) -> str:
        with contextlib.suppress(ClusterError):
            if not cls.reading(environ).cluster_spec():
                return ""
        return "TF_CONFIG is set"

    @classmethod
    def _place(cls, environ: MutableMapping[str, str]) -> Place:
        resolver = cls.reading(environ)
        cluster = cluster_of(resolver)
        if cluster is not None:
            return Place(cluster.index, cluster.num_workers)
        if resolver.task_type == "evaluator":
            return Place(0, 1, "this is the evaluator, which works alone")
        return Place(0, 1)

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster; empty if TF_CONFIG has none."""
        cluster = self._part("cluster")
        try:
            return ClusterSpec(cluster)
        except TypeError as error:
            raise ClusterError(
                f"The cluster in TF_CONFIG can't be read: {error}"
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
                "The index of the task in TF_CONFIG must be an integer. "
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
                f"{name!r} in TF_CONFIG must be an object. Received: {part!r}."
            )
        return part

    def _config(self) -> dict[str, Any]:
        config = json_in(self._environ, "TF_CONFIG")
        if not isinstance(config, dict):
            raise ClusterError(
                "The environment variable TF_CONFIG must be a JSON object with "
                "'cluster' and 'task'. Received: "
                f"{self._environ['TF_CONFIG']!r}."
            )
        return config

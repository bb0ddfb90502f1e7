"""TFConfigClusterResolver: the cluster in the variable TF_CONFIG."""

import json
from typing import Any

from keras_dist.cluster_resolver.environment import EnvironmentResolver
from keras_dist.cluster_resolver.spec import ClusterSpec
from keras_dist.errors import ClusterError

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

"""SimpleClusterResolver: a cluster whose addresses the user gives."""

from collections.abc import Mapping
from typing import Any

from keras_dist.cluster_resolver.base import ClusterResolver
from keras_dist.cluster_resolver.spec import ClusterSpec


class SimpleClusterResolver(ClusterResolver):
    """A resolver for a cluster whose addresses the user gives.

    Args:
        cluster_spec: A `ClusterSpec` with the addresses.
        master: String, the result of `master()` without a task.
        task_type: String, this process' job, such as `"worker"`.
        task_id: Integer, this process' index in its job.
        environment: String, the value of the property `environment`.
        num_accelerators: Dict such as `{"GPU": 2}`, or `None` for none.
        rpc_layer: String, a protocol such as `"grpc"` that `master` puts
            before addresses; or `None`.

    Raises:
        TypeError: If `cluster_spec` is no `ClusterSpec`, or `master` no
            string.

    Example:

    >>> from keras_dist.cluster_resolver import ClusterSpec
    >>> from keras_dist.cluster_resolver import SimpleClusterResolver
    >>> spec = ClusterSpec({"worker": ["10.0.0.1:9000", "10.0.0.2:9000"]})
    >>> resolver = SimpleClusterResolver(spec, task_type="worker", task_id=1)
    >>> resolver.master("worker", 0, rpc_layer="grpc")
    'grpc://10.0.0.1:9000'
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(
                "`cluster_spec` must be a ClusterSpec. Received: "
                f"{cluster_spec!r} of type {type(cluster_spec).__name__}. Make "
                "one with `keras_dist.cluster_resolver.ClusterSpec(...)`."
            )
        if not isinstance(master, str):
            raise TypeError(
                f"`master` must be a string. Received: {master!r} of type "
                f"{type(master).__name__}."
            )
        self._cluster_spec = cluster_spec
        self._master = master
        self._environment = environment
        self._num_accelerators = num_accelerators
        self.task_type = task_type
        self.task_id = task_id
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the given `ClusterSpec`."""
        return self._cluster_spec

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the given task's address, else the given master."""
        if task_type is None or task_id is None:
            return self.with_protocol(self._master, rpc_layer)
        return self.address_of(task_type, task_id, rpc_layer)

    @property
    def environment(self) -> str:
        """The given environment."""
        return self._environment

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """Returns the given numbers of accelerators."""
        return dict(self._num_accelerators or {})

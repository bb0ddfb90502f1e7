"""Resolvers that are made from addresses, or from other resolvers."""

from collections.abc import Mapping
from typing import Any

from keras_dist.cluster_resolver.base import ClusterResolver
from keras_dist.cluster_resolver.spec import ClusterSpec
from keras_dist.errors import ClusterError


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

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Returns the given numbers of accelerators."""
        return dict(self._num_accelerators or {})


_OVERRIDES = ("rpc_layer", "task_type", "task_id")


class UnionResolver(ClusterResolver):
    """A resolver with the tasks of several resolvers.

    Everything but the tasks is taken from the first resolver. Where several
    resolvers have the same job, their lists of addresses are concatenated in
    order. If one of them gives its tasks by index, all are merged by index.

    Args:
        *args: `ClusterResolver`s, at least one.
        **kwargs: `task_type`, `task_id` and `rpc_layer`, each in place of the
            first resolver's.

    Raises:
        TypeError: If an argument is no `ClusterResolver`.
        ClusterError: If there is no resolver, or a keyword is unknown.

    Example:

    >>> from keras_dist.cluster_resolver import ClusterSpec
    >>> from keras_dist.cluster_resolver import SimpleClusterResolver
    >>> from keras_dist.cluster_resolver import UnionResolver
    >>> here, there = [
    ...     SimpleClusterResolver(ClusterSpec({"worker": [address]}))
    ...     for address in ("10.0.0.1:9000", "10.0.0.2:9000")
    ... ]
    >>> union = UnionResolver(here, there, task_type="worker", task_id=0)
    >>> union.cluster_spec()
    ClusterSpec({'worker': ['10.0.0.1:9000', '10.0.0.2:9000']})
    """

    def __init__(self, *args: ClusterResolver, **kwargs: Any) -> None:
        unknown = sorted(kwargs.keys() - set(_OVERRIDES))
        if unknown:
            raise ClusterError(
                f"Unexpected keyword arguments. Received: {', '.join(unknown)}."
                f" Expected: some of {', '.join(_OVERRIDES)}."
            )
        if not args:
            raise ClusterError("At least one ClusterResolver is required.")
        for resolver in args:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(
                    "All arguments must be ClusterResolvers. Received: "
                    f"{resolver!r} of type {type(resolver).__name__}."
                )
        self._resolvers = args
        self.task_type = kwargs.get("task_type")
        self.task_id = kwargs.get("task_id")
        self.rpc_layer = kwargs.get("rpc_layer")

    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of all resolvers.

        Raises:
            KeyError: If two resolvers give the same task index of a job.
        """
        by_job: dict[str, list[Any]] = {}
        for resolver in self._resolvers:
            for job, tasks in resolver.cluster_spec().as_dict().items():
                by_job.setdefault(job, []).append(tasks)
        return ClusterSpec(
            {job: _joined(job, several) for job, several in by_job.items()}
        )

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the given task's address, else the first one's master."""
        if task_type is None or task_id is None:
            return self._resolvers[0].master(rpc_layer=rpc_layer)
        return self.address_of(task_type, task_id, rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Returns the first resolver's number of accelerators, by type."""
        return self._resolvers[0].num_accelerators(
            task_type, task_id, config_proto
        )

    @property
    def environment(self) -> str | None:
        """The first resolver's environment."""
        return self._resolvers[0].environment

    @property
    def coordinator(self) -> str | None:
        """The first resolver's coordinator."""
        return self._resolvers[0].coordinator

    @property
    def restarts(self) -> int:
        """The first resolver's number of restarts."""
        return self._resolvers[0].restarts

    @property
    def job(self) -> str:
        """The first resolver's word of the job."""
        return self._resolvers[0].job

    def own_task(self) -> tuple[str | None, int | None]:
        """Returns the first resolver's task type and index."""
        first = self._resolvers[0]
        return first.task_type, first.task_id

    def own_rpc_layer(self) -> str | None:
        """Returns the first resolver's protocol."""
        return self._resolvers[0].rpc_layer


def _joined(job: str, several: list[Any]) -> Any:
    several = [tasks for tasks in several if tasks]
    if all(isinstance(tasks, list) for tasks in several):
        return [address for tasks in several for address in tasks]
    merged: dict[int, str] = {}
    for tasks in several:
        if isinstance(tasks, list):
            tasks = dict(enumerate(tasks))
        twice = sorted(merged.keys() & tasks.keys())
        if twice:
            raise KeyError(
                "Duplicate keys detected when merging two ClusterSpecs: tasks "
                f"{twice} of job {job!r}. Give each task to one resolver only."
            )
        merged.update(tasks)
    return merged

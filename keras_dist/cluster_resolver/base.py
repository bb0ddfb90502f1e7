"""ClusterResolver: base class for finding the tasks of a cluster."""

from abc import ABC
from abc import abstractmethod
from collections import Counter

from keras_dist.cluster_resolver.spec import ClusterSpec
from keras_dist.plugin.backend import get_backend


class ClusterResolver(ABC):
    """Base class of resolvers, which find a cluster's tasks and the own one.

    A subclass defines `cluster_spec`. For the task of this process it assigns
    `self.task_type` and `self.task_id`, or defines `own_task`. Pass an
    instance to `MultiWorkerMirroredStrategy`.

    Example:

    >>> from keras_dist.cluster_resolver import ClusterResolver
    >>> from keras_dist.cluster_resolver import ClusterSpec
    >>> class Pair(ClusterResolver):
    ...     def __init__(self, index):
    ...         self.task_type = "worker"
    ...         self.task_id = index
    ...
    ...     def cluster_spec(self):
    ...         return ClusterSpec({"worker": ["left:9000", "right:9000"]})
    >>> Pair(1).master()
    'right:9000'
    """

    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None
    _environment: str | None = ""

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns the current cluster; each call looks it up anew."""

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, with its protocol.

        Args:
            task_type: String, the task's job, or `None` for this process' job.
            task_id: Integer, the task's index in its job, or `None` for this
                process' index.
            rpc_layer: String, a protocol such as `"grpc"`, or `None` for the
                resolver's own.

        Returns:
            String, such as `"grpc://10.0.0.1:9000"`; empty if this process'
            task is needed and not known.

        Raises:
            ClusterError: If the cluster has no such task.
        """
        return self.address_of(task_type, task_id, rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Returns the number of this worker's accelerators, by type.

        Args:
            task_type: String, the task's job, or `None` for this process' job.
            task_id: Integer, the task's index in its job, or `None` for this
                process' index. The result is empty for another task, whose
                devices are not visible here.
            config_proto: Ignored.

        Returns:
            Dict such as `{"GPU": 2}`, in which an absent type counts as 0;
            empty if there are only CPUs.
        """
        if task_type is not None and task_id is not None:
            local_task = (self.task_type, self.task_id)
            if (task_type, task_id) != local_task:
                return Counter()
        return local_accelerators()

    @property
    def environment(self) -> str | None:
        """A name of the platform that this runs on; empty by default."""
        return self._environment

    @property
    def task_type(self) -> str | None:
        """This process' job, such as `"worker"`; `None` if unknown."""
        return (
            self.own_task()[0] if self._task_type is None else self._task_type
        )

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = None if task_type is None else str(task_type)

    @property
    def task_id(self) -> int | None:
        """This process' index within its job; `None` if unknown."""
        return self.own_task()[1] if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = None if task_id is None else int(task_id)

    @property
    def rpc_layer(self) -> str | None:
        """The protocol that `master` puts before addresses, or `None`."""
        return (
            self.own_rpc_layer() if self._rpc_layer is None else self._rpc_layer
        )

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    @property
    def coordinator(self) -> str | None:
        """Address of a rendezvous service outside of the workers, or `None`."""
        return None

    @property
    def restarts(self) -> int:
        """Number of times that the workers were restarted."""
        return 0

    @property
    def job(self) -> str:
        """A word that all workers of one start have in common, or `""`.

        Workers of another job have another one, and are refused.
        """
        return ""

    def own_task(self) -> tuple[str | None, int | None]:
        """Returns the default of `task_type` and `task_id`."""
        return None, None

    def own_rpc_layer(self) -> str | None:
        """Returns the default of `rpc_layer`."""
        return None

    def address_of(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns a task's address in the cluster spec, with its protocol.

        It is what `master` returns, with the same arguments and errors, unless
        a subclass has a `master` of its own.
        """
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        address = self.cluster_spec().task_address(task_type, task_id)
        return self.with_protocol(address, rpc_layer)

    def with_protocol(self, address: str, rpc_layer: str | None) -> str:
        """Puts a protocol, by default the resolver's own, before an address."""
        layer = self.rpc_layer if rpc_layer is None else rpc_layer
        return f"{layer}://{address}" if layer else address


def local_accelerators() -> dict[str, int]:
    return Counter(
        device.type.upper()
        for device in get_backend().list_devices()
        if device.is_accelerator
    )

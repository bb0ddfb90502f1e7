"""GCEClusterResolver: the instances of a Compute Engine group as tasks."""

from collections.abc import Iterator
from typing import Any

from keras_dist.cluster_resolver.base import ClusterResolver
from keras_dist.cluster_resolver.google_api import build_service
from keras_dist.cluster_resolver.spec import ClusterSpec


class GCEClusterResolver(ClusterResolver):
    """A resolver for the running instances of a group, sorted by address.

    All instances belong to one job. Google Compute Engine does not tell a
    process its task, so pass each instance its own `task_id`.

    Args:
        project: String, the name of the project.
        zone: String, the group's zone.
        instance_group: String, the name of the group.
        port: Integer, the port of every task.
        task_type: String, the job of the instances.
        task_id: Integer, this process' index, in the order of the addresses.
        rpc_layer: String, the protocol that `master` puts before addresses.
        credentials: Credentials of Google's API client; by default those of
            the environment. Not used with `service`.
        service: The result of
            `googleapiclient.discovery.build("compute", "v1")`. By default a
            service is created.

    Raises:
        ImportError: If no service is given, and Google's API client is not
            installed.

    Example:

    ```python
    resolver = GCEClusterResolver(
        "my-project", "us-west1-a", "trainers", port=8470, task_id=1
    )
    strategy = keras_dist.MultiWorkerMirroredStrategy(resolver)
    ```
    """

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int = 0,
        rpc_layer: str | None = "grpc",
        credentials: Any = "default",
        service: Any = None,
    ) -> None:
        self._place = {"project": project, "zone": zone}
        self._instance_group = instance_group
        self._port = port
        self._task_type = task_type
        self.task_id = task_id
        self.rpc_layer = rpc_layer
        self._service = (
            build_service("compute", "v1", credentials, type(self).__name__)
            if service is None
            else service
        )

    @property
    def task_type(self) -> str | None:
        """The job of the instances; it can't be assigned."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        raise RuntimeError(
            "The task_type of a GCEClusterResolver can't be reset. Received: "
            f"{task_type!r}. Pass `task_type` when you make it."
        )

    def cluster_spec(self) -> ClusterSpec:
        """Returns the addresses of the running instances."""
        addresses = sorted(
            f"{self._address(name)}:{self._port}" for name in self._instances()
        )
        return ClusterSpec({str(self._task_type): addresses})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, by default this process' task."""
        return self.address_of(task_type, task_id, rpc_layer)

    def _instances(self) -> Iterator[str]:
        groups = self._service.instanceGroups()
        request = groups.listInstances(
            **self._place,
            instanceGroup=self._instance_group,
            body={"instanceState": "RUNNING"},
        )
        while request is not None:
            page = request.execute()
            for item in page.get("items", []):
                yield item["instance"].rsplit("/", 1)[-1]
            request = groups.listInstances_next(
                previous_request=request, previous_response=page
            )

    def _address(self, instance: str) -> str:
        found = (
            self._service.instances()
            .get(**self._place, instance=instance)
            .execute()
        )
        return str(found["networkInterfaces"][0]["networkIP"])

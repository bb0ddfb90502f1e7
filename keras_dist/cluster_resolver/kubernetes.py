"""KubernetesClusterResolver: the pods of a Kubernetes cluster as tasks."""

import enum
import importlib
import os
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from keras_dist.cluster_resolver.base import ClusterResolver
from keras_dist.cluster_resolver.spec import ClusterSpec
from keras_dist.errors import ClusterError


class KubernetesExecutableLocation(enum.Enum):
    """The location of this process: in a pod of the cluster or outside.

    `WITHIN_CLUSTER` means in a pod, `OFF_CLUSTER` outside of the cluster.

    Example:

    >>> from keras_dist.cluster_resolver import KubernetesExecutableLocation
    >>> KubernetesExecutableLocation(1).name
    'OFF_CLUSTER'
    """

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


class KubernetesClusterResolver(ClusterResolver):
    """A resolver for the running pods that labels select, sorted by name.

    A task's address is its host's IP address with `tf_server_port`, so a host
    can have one pod only. The task of this process follows from the
    environment variable `POD_NAME`, if the pod's specification sets it from
    the field `metadata.name`; else assign `task_type` and `task_id`. This
    resolver is not needed if the pods have the environment variables
    `KERAS_DIST_WORKERS` and `KERAS_DIST_WORKER_INDEX`.

    Args:
        job_to_label_mapping: Dict from the names of jobs to lists of label
            selectors; by default `{"worker": ["job-name=tensorflow"]}`.
        tf_server_port: Integer, the port of every task.
        rpc_layer: String, the protocol that `master` puts before addresses.
        override_client: An object with `list_pod_for_all_namespaces`, such as
            `kubernetes.client.CoreV1Api()`. By default a client is created.
        executable_location: A `KubernetesExecutableLocation`, which decides
            where the client looks for credentials.

    Raises:
        ImportError: If no client is given, and `kubernetes` is not installed.
        ClusterError: If `executable_location` is something else.

    Example:

    ```python
    resolver = KubernetesClusterResolver({"worker": ["job-name=train"]})
    strategy = keras_dist.MultiWorkerMirroredStrategy(resolver)
    ```
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation = (
            KubernetesExecutableLocation.WITHIN_CLUSTER
        ),
    ) -> None:
        if not isinstance(executable_location, KubernetesExecutableLocation):
            raise ClusterError(
                "`executable_location` must be a KubernetesExecutableLocation. "
                f"Received: {executable_location!r}."
            )
        self._selectors = dict(
            job_to_label_mapping or {"worker": ["job-name=tensorflow"]}
        )
        self._port = tf_server_port
        self.rpc_layer = rpc_layer
        self._client = (
            _client(executable_location)
            if override_client is None
            else override_client
        )

    def cluster_spec(self) -> ClusterSpec:
        """Returns the addresses of the selected pods.

        Raises:
            RuntimeError: If a selected pod is not running.
        """
        return ClusterSpec(
            {
                job: [f"{pod.status.host_ip}:{self._port}" for pod in pods]
                for job, pods in self._pods().items()
            }
        )

    def own_task(self) -> tuple[str | None, int | None]:
        """Returns the task of the pod `POD_NAME`."""
        pod_name = os.environ.get("POD_NAME")
        if not pod_name:
            return None, None
        for job, pods in self._pods().items():
            names = [pod.metadata.name for pod in pods]
            if pod_name in names:
                return job, names.index(pod_name)
        raise ClusterError(
            "The selected pods do not include this pod. Received: "
            f"POD_NAME={pod_name!r} and "
            f"job_to_label_mapping={self._selectors}. "
            "Choose labels that this pod has too."
        )

    def _pods(self) -> dict[str, list[Any]]:
        return {
            job: [
                pod
                for selector in selectors
                for pod in self._selected(selector)
            ]
            for job, selectors in self._selectors.items()
        }

    def _selected(self, selector: str) -> list[Any]:
        pod_list = self._client.list_pod_for_all_namespaces(
            label_selector=selector
        )
        pods = sorted(pod_list.items, key=lambda pod: pod.metadata.name)
        for pod in pods:
            if pod.status.phase != "Running":
                raise RuntimeError(
                    f'Pod "{pod.metadata.name}" is not running; phase: '
                    f'"{pod.status.phase}". Wait until all pods of '
                    f"{selector!r} run, or select others."
                )
        return pods


def _client(location: KubernetesExecutableLocation) -> Any:
    try:
        kubernetes = importlib.import_module("kubernetes")
        importlib.import_module("kubernetes.config")
        importlib.import_module("kubernetes.client")
    except ImportError as error:
        raise ImportError(
            "KubernetesClusterResolver needs the Kubernetes client for Python. "
            "Install it with `pip install kubernetes`, or pass "
            "`override_client`."
        ) from error
    if location is KubernetesExecutableLocation.OFF_CLUSTER:
        kubernetes.config.load_kube_config()
    else:
        kubernetes.config.load_incluster_config()
    return kubernetes.client.CoreV1Api()

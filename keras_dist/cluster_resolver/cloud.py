"""The cluster resolver of Cloud TPUs."""

import importlib
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from keras_dist.cluster_resolver.base import ClusterResolver
from keras_dist.cluster_resolver.base import local_accelerators
from keras_dist.cluster_resolver.environment import json_in
from keras_dist.cluster_resolver.slices import worker_id
from keras_dist.cluster_resolver.spec import ClusterSpec
from keras_dist.errors import ClusterError
from keras_dist.plugin.backend import list_devices

_ENDPOINTS = "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS"
_LOCAL = "local"
# CPU devices in place of the TPU of this host.
VIRTUAL = "virtual"
_HERE = (_LOCAL, VIRTUAL)
_PORT = "8470"
_PROTOCOL = "grpc://"


class TPUClusterResolver(ClusterResolver):
    """A resolver for the addresses of a Cloud TPU's workers.

    It finds addresses only. Keras 3 has no counterpart of TensorFlow's remote
    control of a TPU (`connect`, system metadata): run one process on each host
    of the TPU, with JAX. If Google Kubernetes Engine sets TPU_WORKER_ID, that
    is the process' `task_id`. Elsewhere, assign it.

    Args:
        tpu: String: a TPU's name, `"grpc://host:port"` addresses separated by
            commas, or `"local"` for the TPU of this host. With `"virtual"`,
            the CPU devices of this host stand in for a TPU. By default, and if
            empty, the value of `KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS`, else of
            `TPU_NAME`, else of `TPU_CONFIG`.
        zone: String; by default this machine's zone in Google Cloud.
        project: String; by default this machine's project in Google Cloud.
        job_name: String, the job of the TPU's workers.
        coordinator_name: String, a job to add for the coordinator, or `None`.
        coordinator_address: String, the coordinator's `"host:port"`. The
            resolver starts no coordinator.
        credentials: Credentials of Google's API client; by default those of
            the environment. Not used with `service`.
        service: The result of `googleapiclient.discovery.build("tpu", "v1")`.
            By default a service is created.
        discovery_url: String, the address of the API's description. The
            environment variable `TPU_API_DISCOVERY_URL` takes precedence.

    Raises:
        ClusterError: If no TPU is named, or several, or a coordinator without
            its address.
        ImportError: If no service is given, and Google's API client is not
            installed.

    Example:

    >>> from keras_dist.cluster_resolver import TPUClusterResolver
    >>> resolver = TPUClusterResolver("grpc://10.0.0.1:8470,grpc://10.0.0.2")
    >>> resolver.cluster_spec()
    ClusterSpec({'worker': ['10.0.0.1:8470', '10.0.0.2:8470']})
    """

    def __init__(
        self,
        tpu: str | Sequence[str] | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: Any = "default",
        service: Any = None,
        discovery_url: str | None = None,
    ) -> None:
        if coordinator_name and not coordinator_address:
            raise ClusterError(
                "`coordinator_name` needs `coordinator_address`.\nReceived: "
                f"coordinator_name={coordinator_name!r} without an address. "
                "This resolver starts no coordinator. Pass the address of "
                "one as 'host:port', or leave both arguments out."
            )
        self.task_type = job_name
        self.task_id = worker_id(os.environ)
        self._coordinator = (
            {coordinator_name: [coordinator_address]}
            if coordinator_name
            else {}
        )
        self._tpu, zone, project = _named(tpu, zone, project)
        self._node, self._service = "", service
        if self._tpu in _HERE or self._tpu.startswith(_PROTOCOL):
            return
        project = project or _metadata("project/project-id")
        zone = zone or _metadata("instance/zone").rsplit("/", 1)[-1]
        self._node = f"projects/{project}/locations/{zone}/nodes/{self._tpu}"
        if service is None:
            url = os.environ.get("TPU_API_DISCOVERY_URL") or discovery_url
            self._service = _service(credentials, url)

    def cluster_spec(self) -> ClusterSpec:
        """Returns the addresses of the TPU's workers; empty for a local TPU.

        Raises:
            RuntimeError: If the TPU is not ready, or unhealthy.
            ClusterError: If there is no such TPU.
        """
        if self._tpu in _HERE:
            return ClusterSpec({})
        addresses = (
            self._node_addresses()
            if self._node
            else [_address(address) for address in self._tpu.split(",")]
        )
        return ClusterSpec(
            {str(self.task_type): addresses, **self._coordinator}
        )

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns a worker's address, by default that of `task_id`.

        The result is empty for a local TPU.
        """
        if self._tpu in _HERE:
            return ""
        return self.address_of(task_type, task_id, rpc_layer)

    @property
    def is_virtual(self) -> bool:
        """True if CPU devices stand in for the TPU."""
        return self._tpu == VIRTUAL

    def own_rpc_layer(self) -> str | None:
        """Returns `"grpc"`."""
        return "grpc"

    def get_master(self) -> str:
        """Returns the result of `master()`."""
        return self.master()

    def get_job_name(self) -> str | None:
        """Returns the job of the TPU's workers."""
        return self.task_type

    def get_coordination_service_leader(self) -> str:
        """Returns the name of the leading task."""
        return f"/job:{self.get_job_name()}/task:0"

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Returns the number of TPU cores of this host, whatever the task."""
        if self.is_virtual:
            return {"TPU": len(list_devices("cpu"))}
        return {"TPU": local_accelerators().get("TPU", 0)}

    def _node_addresses(self) -> list[str]:
        nodes = self._service.projects().locations().nodes()
        try:
            node = nodes.get(name=self._node).execute()
        except Exception as error:
            raise ClusterError(
                f"Could not lookup TPU metadata of {self._node!r}. Check "
                "`tpu`, `zone` and `project`, and that the credentials may "
                f"read them. The error was: {error!r}."
            ) from error
        if node.get("state") != "READY":
            raise RuntimeError(
                f"TPU {self._tpu!r} is not yet ready; state: "
                f"{node.get('state')!r}."
            )
        if node.get("health") not in (None, "HEALTHY", "HEALTH_UNSPECIFIED"):
            raise RuntimeError(
                f"TPU {self._tpu!r} is unhealthy; health: {node['health']!r}."
            )
        return [
            f"{endpoint['ipAddress']}:{endpoint['port']}"
            for endpoint in node.get("networkEndpoints") or [node]
        ]


def _named(
    tpu: str | Sequence[str] | None, zone: str | None, project: str | None
) -> tuple[str, str | None, str | None]:
    """Returns a TPU's name, zone and project; the environment has defaults."""
    if tpu is not None and not isinstance(tpu, str):
        if len(tpu) != 1:
            raise ClusterError(
                f"`tpu` must name one TPU. Received: tpu={list(tpu)!r}. "
                "Pass one name."
            )
        (tpu,) = tpu
    if tpu:
        return tpu, zone, project
    if os.environ.get(_ENDPOINTS):
        endpoints = os.environ[_ENDPOINTS].removeprefix(_PROTOCOL)
        return _PROTOCOL + endpoints, zone, project
    if os.environ.get("TPU_NAME"):
        return os.environ["TPU_NAME"], zone, project
    config = json_in(os.environ, "TPU_CONFIG")
    if not isinstance(config, dict) or not config.get("tpu_node_name"):
        raise ClusterError(
            'Please provide a TPU Name to connect to. Pass `tpu` ("local" for '
            f"the TPU of this host), or set TPU_NAME or {_ENDPOINTS}."
        )
    return (
        config["tpu_node_name"],
        zone or config.get("zone"),
        project or config.get("project"),
    )


def _address(endpoint: str) -> str:
    host, _, port = endpoint.strip().removeprefix(_PROTOCOL).partition(":")
    return f"{host}:{port or _PORT}"


def _service(credentials: object, url: str | None) -> Any:
    """Creates the service of Google's API client that knows TPUs."""
    try:
        discovery = importlib.import_module("googleapiclient.discovery")
    except ImportError as error:
        raise ImportError(
            "TPUClusterResolver needs Google's API client. Install it with "
            "`pip install google-api-python-client`, or pass `service`."
        ) from error
    return discovery.build(
        "tpu",
        "v1",
        credentials=None if credentials == "default" else credentials,
        cache_discovery=False,
        **({"discoveryServiceUrl": url} if url else {}),
    )


def _metadata(path: str) -> str:
    """Returns an entry of Google Cloud's metadata of this machine."""
    host = (
        os.environ.get("GCE_METADATA_HOST")
        or os.environ.get("GCE_METADATA_IP")
        or "metadata.google.internal"
    )
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/{path}",
        headers={"Metadata-Flavor": "Google"},
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return str(response.read().decode())
    except (OSError, urllib.error.URLError) as error:
        raise ClusterError(
            f"Google Cloud's metadata server at {host} does not answer. Pass "
            f"`project` and `zone`. The error was: {error!r}."
        ) from error

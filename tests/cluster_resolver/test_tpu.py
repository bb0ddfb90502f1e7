"""`TPUClusterResolver` finds the workers of a Cloud TPU."""

import http.server
import sys
import threading
from types import ModuleType
from types import SimpleNamespace

import pytest

from conformance.contract import contract
from keras_dist.cluster_resolver import TPUClusterResolver
from keras_dist.cluster_resolver import cloud
from keras_dist.cluster_resolver.slices import hosts_of_slice
from keras_dist.errors import ClusterError
from keras_dist.plugin.backend import list_devices

READY = {"state": "READY", "health": "HEALTHY"}
ONE = {**READY, "ipAddress": "10.1.2.3", "port": "8470"}
POD = {
    **READY,
    "networkEndpoints": [
        {"ipAddress": f"10.2.3.{i}", "port": 8470} for i in range(4, 8)
    ],
}
ENDPOINTS = "grpc://10.120.27.5:8470,grpc://10.120.27.6:8470"


def tpu_service(**nodes):
    """A TPU service that knows nodes of project `project` in zone `zone`.

    Args:
        **nodes: Google's answers by name.
    """

    def execute(name):
        return nodes[
            name.removeprefix("projects/project/locations/zone/nodes/")
        ]

    found = SimpleNamespace(
        get=lambda name: SimpleNamespace(execute=lambda: execute(name))
    )
    locations = SimpleNamespace(nodes=lambda: found)
    projects = SimpleNamespace(locations=lambda: locations)
    return SimpleNamespace(projects=lambda: projects)


def _resolver(api, node, **options):
    return api.TPUClusterResolver(
        tpu="mine",
        project="project",
        zone="zone",
        credentials=None,
        service=tpu_service(mine=node),
        **options,
    )


@contract("R-20")
def test_a_named_tpu(api):
    resolver = _resolver(api, ONE)
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.1.2.3:8470"]}
    assert resolver.master() == resolver.get_master() == "grpc://10.1.2.3:8470"
    assert resolver.get_job_name() == "worker"
    assert resolver.environment == ""
    leader = resolver.get_coordination_service_leader()
    assert leader == "/job:worker/task:0"


@contract("R-20")
def test_a_pod(api):
    resolver = _resolver(
        api,
        POD,
        job_name="tpus",
        coordinator_name="coordinator",
        coordinator_address="10.128.1.5:10203",
    )
    assert resolver.cluster_spec().as_dict() == {
        "tpus": [f"10.2.3.{i}:8470" for i in range(4, 8)],
        "coordinator": ["10.128.1.5:10203"],
    }
    assert resolver.master() == "grpc://10.2.3.4:8470"
    assert resolver.master("coordinator", 0) == "grpc://10.128.1.5:10203"
    resolver.task_id = 3
    assert resolver.master() == "grpc://10.2.3.7:8470"


@contract("R-20")
def test_addresses_and_names(api, environ):
    for name in ("grpc://10.1.2.3:8470", ["grpc://10.1.2.3"]):
        resolver = api.TPUClusterResolver(tpu=name)
        assert resolver.master() == "grpc://10.1.2.3:8470"
    for name in (None, ""):
        with pytest.raises(ValueError, match="Please provide a TPU Name to c"):
            api.TPUClusterResolver(name)
    environ["TPU_NAME"] = "grpc://10.1.2.4:8470"
    assert api.TPUClusterResolver().master() == "grpc://10.1.2.4:8470"
    assert api.TPUClusterResolver("").master() == "grpc://10.1.2.4:8470"
    del environ["TPU_NAME"]
    environ["TPU_CONFIG"] = (
        '{"tpu_node_name": "mine", "project": "project", "zone": "zone"}'
    )
    service = tpu_service(mine=ONE)
    resolver = api.TPUClusterResolver(credentials=None, service=service)
    assert resolver.master() == "grpc://10.1.2.3:8470"
    del environ["TPU_CONFIG"]
    environ["KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS"] = ENDPOINTS
    resolver = api.TPUClusterResolver()
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["10.120.27.5:8470", "10.120.27.6:8470"]
    }
    assert resolver.master() == "grpc://10.120.27.5:8470"


@contract("R-20")
def test_the_tpu_of_this_host(api):
    resolver = api.TPUClusterResolver("local")
    assert not resolver.cluster_spec()
    assert resolver.master() == ""
    assert resolver.num_accelerators() == {"TPU": 0}


@pytest.mark.parametrize("name", ["virtual", ["virtual"], None])
def test_cpu_devices_in_place_of_a_tpu(name, environ):
    if name is None:
        environ["TPU_NAME"] = "virtual"
    resolver = TPUClusterResolver(name)
    assert resolver.is_virtual
    assert not resolver.cluster_spec()
    assert resolver.master() == ""
    assert resolver.num_accelerators() == {"TPU": len(list_devices("cpu"))}
    assert not TPUClusterResolver("local").is_virtual


def test_the_position_of_this_host(environ):
    environ["TPU_WORKER_ID"] = "1"
    resolver = TPUClusterResolver(ENDPOINTS)
    assert resolver.task_id == 1
    assert resolver.master() == "grpc://10.120.27.6:8470"
    for value in ("-1", "one"):
        environ["TPU_WORKER_ID"] = value
        with pytest.raises(ClusterError, match=f"(?s)TPU_WORKER_ID.*{value}"):
            TPUClusterResolver(ENDPOINTS)


def test_the_hosts_of_a_slice():
    assert hosts_of_slice({}) is None
    assert hosts_of_slice({"TPU_WORKER_HOSTNAMES": "localhost"}) is None
    names = {"TPU_WORKER_HOSTNAMES": "a, b"}
    resolver = hosts_of_slice({**names, "TPU_WORKER_ID": "1"})
    assert resolver.cluster_spec().as_dict() == {"worker": ["a:8482", "b:8482"]}
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    with pytest.raises(ClusterError, match="(?s)TPU_WORKER_ID.*Received: ''"):
        hosts_of_slice(names)


@contract("R-20", native=False)
def test_cores_of_this_host_are_counted(environ, monkeypatch):
    environ["TPU_NAME"] = "local"
    assert not TPUClusterResolver().cluster_spec()
    monkeypatch.setattr(cloud, "local_accelerators", lambda: {"TPU": 4})
    resolver = TPUClusterResolver(ENDPOINTS)
    assert resolver.num_accelerators() == {"TPU": 4}


@contract("R-20")
def test_a_tpu_that_is_not_there(api):
    resolver = _resolver(api, {**ONE, "state": "CREATING"})
    with pytest.raises(RuntimeError, match="(?s)not yet ready.*CREATING"):
        resolver.cluster_spec()
    resolver = api.TPUClusterResolver(
        "other", "zone", "project", credentials=None, service=tpu_service()
    )
    with pytest.raises(ValueError, match="Could not lookup TPU metadata"):
        resolver.cluster_spec()


@contract("R-20", native=False)
def test_unhealthy(api):
    resolver = _resolver(api, {**ONE, "health": "UNHEALTHY_MAINTENANCE"})
    with pytest.raises(RuntimeError, match="(?s)unhealthy.*_MAINTENANCE"):
        resolver.cluster_spec()
    unknown = _resolver(api, {**ONE, "health": "HEALTH_UNSPECIFIED"})
    assert unknown.master() == "grpc://10.1.2.3:8470"


def test_arguments_and_variables_that_can_not_be_read(environ):
    for names in ([], ["a", "b"]):
        with pytest.raises(ClusterError, match="must name one TPU"):
            TPUClusterResolver(names)
    with pytest.raises(ClusterError, match="needs `coordinator_address`"):
        TPUClusterResolver("local", coordinator_name="coordinator")
    environ["TPU_CONFIG"] = "{"
    with pytest.raises(ClusterError, match="TPU_CONFIG is not JSON"):
        TPUClusterResolver()


class _Metadata(http.server.BaseHTTPRequestHandler):
    ANSWERS = {
        "/computeMetadata/v1/project/project-id": b"project",
        "/computeMetadata/v1/instance/zone": b"projects/7/zones/zone",
    }

    def do_GET(self):
        assert self.headers["Metadata-Flavor"] == "Google"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.ANSWERS[self.path])

    def log_message(self, *args):
        """Says nothing on the screen."""


@pytest.fixture
def metadata(environ):
    """A metadata server on this host."""
    with http.server.HTTPServer(("127.0.0.1", 0), _Metadata) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        host, port = server.server_address
        environ["GCE_METADATA_HOST"] = f"{host}:{port}"
        yield
        server.shutdown()
        thread.join()


@contract("R-20")
def test_project_and_zone_of_this_machine(api, metadata):
    resolver = api.TPUClusterResolver(
        "mine", credentials=None, service=tpu_service(mine=ONE)
    )
    assert resolver.master() == "grpc://10.1.2.3:8470"


def test_a_machine_outside_of_google_cloud(environ):
    with http.server.HTTPServer(("127.0.0.1", 0), _Metadata) as server:
        environ["GCE_METADATA_IP"] = f"127.0.0.1:{server.server_port}"
    with pytest.raises(ClusterError, match="Pass `project` and `zone`"):
        TPUClusterResolver("mine", service=tpu_service())


def test_the_client_is_made_where_the_api_is(monkeypatch, environ):
    def build(name, version, credentials, cache_discovery, **options):
        assert (name, version, credentials) == ("tpu", "v1", None)
        urls.append(options.get("discoveryServiceUrl"))
        return tpu_service(mine=ONE)

    urls = []
    discovery = ModuleType("googleapiclient.discovery")
    discovery.build = build
    package = ModuleType("googleapiclient")
    monkeypatch.setitem(sys.modules, "googleapiclient", package)
    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", discovery)
    TPUClusterResolver("mine", "zone", "project")
    TPUClusterResolver("mine", "zone", "project", discovery_url="https://a")
    environ["TPU_API_DISCOVERY_URL"] = "https://b"
    TPUClusterResolver("mine", "zone", "project", discovery_url="https://a")
    assert urls == [None, "https://a", "https://b"]


def test_without_a_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "googleapiclient", None)
    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", None)
    with pytest.raises(ImportError, match="TPUClusterResolver needs"):
        TPUClusterResolver("mine", "zone", "project")

"""`KubernetesClusterResolver` has pods as the tasks of a cluster."""

import sys
from types import ModuleType
from types import SimpleNamespace

import pytest

from conformance.contract import contract
from keras_dist.cluster_resolver import KubernetesClusterResolver
from keras_dist.cluster_resolver import KubernetesExecutableLocation
from keras_dist.errors import ClusterError


def _pod(name, host, phase="Running"):
    return SimpleNamespace(
        metadata=SimpleNamespace(name=name),
        status=SimpleNamespace(phase=phase, host_ip=host),
    )


class _Client:
    """Kubernetes' answers by label selector."""

    def __init__(self, **pods):
        self._pods = pods

    def list_pod_for_all_namespaces(self, label_selector):
        assert label_selector.startswith("job-name=")
        job = label_selector.removeprefix("job-name=")
        return SimpleNamespace(items=self._pods[job])


THREE = _Client(
    tensorflow=[
        _pod("t-abc", "10.1.2.3"),
        _pod("t-def", "10.1.2.4"),
        _pod("t-999", "10.1.2.5"),
    ]
)


@contract("R-18")
def test_pods_are_sorted_by_name(api):
    resolver = api.KubernetesClusterResolver(override_client=THREE)
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["10.1.2.5:8470", "10.1.2.3:8470", "10.1.2.4:8470"]
    }


@contract("R-18")
def test_several_jobs_and_selectors(api):
    client = _Client(
        one=[_pod("b", "10.0.0.2"), _pod("a", "10.0.0.1")],
        two=[_pod("0", "10.0.0.3")],
        ps=[_pod("p", "10.0.0.9")],
    )
    resolver = api.KubernetesClusterResolver(
        {"worker": ["job-name=one", "job-name=two"], "ps": ["job-name=ps"]},
        tf_server_port=9000,
        override_client=client,
    )
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["10.0.0.1:9000", "10.0.0.2:9000", "10.0.0.3:9000"],
        "ps": ["10.0.0.9:9000"],
    }


@contract("R-18")
@pytest.mark.parametrize("phase", ["Failed", "Pending"])
def test_a_pod_that_does_not_run(api, phase):
    client = _Client(tensorflow=[_pod("t-abc", "10.1.2.3", phase)])
    resolver = api.KubernetesClusterResolver(override_client=client)
    message = f'Pod "t-abc" is not running; phase: "{phase}"'
    with pytest.raises(RuntimeError, match=f"(?s){message}"):
        resolver.cluster_spec()


@contract("R-18")
def test_master_and_protocol(api):
    resolver = api.KubernetesClusterResolver(override_client=THREE)
    assert resolver.master() == ""
    assert (resolver.task_type, resolver.task_id) == (None, None)
    resolver.task_type, resolver.task_id = "worker", 0
    assert resolver.master() == "grpc://10.1.2.5:8470"
    assert resolver.master("worker", 2) == "grpc://10.1.2.4:8470"
    assert resolver.master("worker", 2, "http") == "http://10.1.2.4:8470"
    resolver.rpc_layer = "ab"
    assert resolver.master() == "ab://10.1.2.5:8470"


@contract("R-18")
def test_locations(api):
    locations = api.KubernetesExecutableLocation
    assert [(each.name, each.value) for each in locations] == [
        ("WITHIN_CLUSTER", 0),
        ("OFF_CLUSTER", 1),
    ]


@contract("R-18", native=False)
@pytest.mark.parametrize("location", [None, 1, "OFF_CLUSTER"])
def test_another_location(location):
    with pytest.raises(ClusterError, match=f"(?s)executable_loc.*{location!r}"):
        KubernetesClusterResolver(
            override_client=THREE, executable_location=location
        )


def test_the_own_task_follows_from_the_pod(environ):
    environ["POD_NAME"] = "t-def"
    resolver = KubernetesClusterResolver(override_client=THREE)
    assert (resolver.task_type, resolver.task_id) == ("worker", 2)
    assert resolver.master() == "grpc://10.1.2.4:8470"
    resolver.task_id = 1
    assert resolver.master() == "grpc://10.1.2.3:8470"
    environ["POD_NAME"] = "other"
    with pytest.raises(ClusterError, match="POD_NAME='other' and job_to"):
        assert resolver.task_type is None


@pytest.fixture
def kubernetes(monkeypatch):
    """A stand-in for the package `kubernetes` that says what was loaded."""
    loaded = []
    package = ModuleType("kubernetes")
    package.config = ModuleType("kubernetes.config")
    package.client = ModuleType("kubernetes.client")
    package.config.load_kube_config = lambda: loaded.append("file")
    package.config.load_incluster_config = lambda: loaded.append("pod")
    package.client.CoreV1Api = lambda: THREE
    for module in (package, package.config, package.client):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return loaded


@pytest.mark.parametrize(
    ("location", "source"),
    [
        (KubernetesExecutableLocation.WITHIN_CLUSTER, "pod"),
        (KubernetesExecutableLocation.OFF_CLUSTER, "file"),
    ],
)
def test_credentials_are_those_of_the_location(kubernetes, location, source):
    resolver = KubernetesClusterResolver(executable_location=location)
    assert resolver.cluster_spec().num_tasks("worker") == 3
    assert kubernetes == [source]


def test_without_a_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ImportError, match="pip install kubernetes"):
        KubernetesClusterResolver()

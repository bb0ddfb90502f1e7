"""GCEClusterResolver: an instance group of Google Compute Engine."""

import sys
from types import ModuleType

import pytest

from cluster_resolver.google import compute_service
from conformance.contract import contract
from keras_dist.cluster_resolver import GCEClusterResolver

GROUP = {"project": "project", "zone": "zone", "instance_group": "group"}
THREE = {"one": "10.1.2.5", "two": "10.1.2.3", "three": "10.1.2.4"}


def _resolver(api, *pages, **options):
    service = compute_service(*pages)
    return api.GCEClusterResolver(
        **GROUP, port=8470, service=service, **options
    )


@contract("R-19")
def test_addresses_are_sorted(api):
    resolver = _resolver(api, THREE)
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["10.1.2.3:8470", "10.1.2.4:8470", "10.1.2.5:8470"]
    }


@contract("R-19")
def test_all_pages_are_read(api):
    resolver = _resolver(api, {"a": "10.0.0.2"}, {"b": "10.0.0.1"})
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["10.0.0.1:8470", "10.0.0.2:8470"]
    }


@contract("R-19")
def test_master_and_protocol(api):
    resolver = _resolver(api, THREE, task_type="testworker")
    assert (resolver.task_type, resolver.task_id) == ("testworker", 0)
    assert resolver.master() == "grpc://10.1.2.3:8470"
    assert resolver.master("testworker", 2) == "grpc://10.1.2.5:8470"
    assert resolver.master(rpc_layer="ab") == "ab://10.1.2.3:8470"
    resolver.task_id, resolver.rpc_layer = 1, "cd"
    assert resolver.master() == "cd://10.1.2.4:8470"


@contract("R-19")
def test_an_empty_group_is_an_empty_job(api):
    spec = _resolver(api, {}).cluster_spec()
    assert (spec.jobs, spec.num_tasks("worker")) == (["worker"], 0)


@contract("R-19", native=False)
def test_an_answer_without_items(api):
    spec = _resolver(api, None).cluster_spec()
    assert (spec.jobs, spec.num_tasks("worker")) == (["worker"], 0)


@contract("R-19")
def test_the_job_stays(api):
    resolver = _resolver(api, THREE)
    with pytest.raises(RuntimeError, match="reset"):
        resolver.task_type = "ps"
    assert resolver.task_type == "worker"


def test_without_a_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "googleapiclient", None)
    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", None)
    message = "GCEClusterResolver needs .*pip install google-api-python-client"
    with pytest.raises(ImportError, match=message):
        GCEClusterResolver(**GROUP, port=8470)


@pytest.mark.parametrize(
    ("given", "used"), [("default", None), (None, None), ("mine", "mine")]
)
def test_the_client_is_made_with_the_credentials(monkeypatch, given, used):
    def build(name, version, credentials, cache_discovery):
        assert (name, version, cache_discovery) == ("compute", "v1", False)
        assert credentials == used
        return compute_service(THREE)

    discovery = ModuleType("googleapiclient.discovery")
    discovery.build = build
    package = ModuleType("googleapiclient")
    monkeypatch.setitem(sys.modules, "googleapiclient", package)
    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", discovery)
    resolver = GCEClusterResolver(**GROUP, port=8470, credentials=given)
    assert resolver.cluster_spec().num_tasks("worker") == 3

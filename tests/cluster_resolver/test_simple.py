"""`SimpleClusterResolver` is a cluster that is known."""

import pytest

from cluster_resolver.helpers import SPEC
from conformance.contract import contract


@contract("R-1")
def test_what_it_takes(api):
    with pytest.raises(TypeError, match="cluster_spec"):
        api.SimpleClusterResolver(SPEC)
    with pytest.raises(TypeError, match="master"):
        api.SimpleClusterResolver(api.ClusterSpec(SPEC), master=1)


@contract("R-2")
def test_master(api):
    spec = api.ClusterSpec(SPEC)
    plain = api.SimpleClusterResolver(spec)
    assert plain.master() == ""
    assert plain.master("worker", 2) == "worker2:2222"
    assert plain.master("worker", 0, rpc_layer="grpc") == "grpc://worker0:2222"
    fixed = api.SimpleClusterResolver(spec, "fixed:1", rpc_layer="grpc")
    assert fixed.master() == "grpc://fixed:1"
    assert fixed.master("worker") == "grpc://fixed:1"
    assert fixed.master("worker", 1) == "grpc://worker1:2222"
    assert fixed.master("worker", 1, "http") == "http://worker1:2222"


@contract("R-3")
def test_attributes(api):
    resolver = api.SimpleClusterResolver(
        api.ClusterSpec(SPEC),
        task_type="ps",
        task_id=1,
        environment="cloud",
        num_accelerators={"GPU": 8},
        rpc_layer="grpc",
    )
    assert resolver.cluster_spec().as_dict() == SPEC
    assert (resolver.task_type, resolver.task_id) == ("ps", 1)
    assert resolver.num_accelerators() == {"GPU": 8}
    assert resolver.num_accelerators("worker", 1, None) == {"GPU": 8}
    assert (resolver.environment, resolver.rpc_layer) == ("cloud", "grpc")
    resolver.task_type = "worker"
    resolver.task_id = 0
    resolver.rpc_layer = "http"
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert resolver.rpc_layer == "http"
    resolver.task_type = resolver.task_id = None
    assert (resolver.task_type, resolver.task_id) == (None, None)


@contract("R-3")
def test_defaults(api):
    resolver = api.SimpleClusterResolver(api.ClusterSpec({}))
    assert resolver.num_accelerators() == {}
    assert resolver.environment == ""
    assert resolver.rpc_layer is None
    assert (resolver.task_type, resolver.task_id) == (None, None)

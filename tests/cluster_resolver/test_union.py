"""`UnionResolver` joins the clusters of several resolvers."""

import pytest

from cluster_resolver.helpers import SPEC
from conformance.contract import contract
from keras_dist.cluster_resolver import KerasDistClusterResolver
from keras_dist.cluster_resolver import UnionResolver


def _simple(api, tasks, **options):
    return api.SimpleClusterResolver(api.ClusterSpec(tasks), **options)


def _union(api, *specs):
    resolver = api.UnionResolver(*(_simple(api, spec) for spec in specs))
    return resolver.cluster_spec().as_dict()


@contract("R-11")
def test_lists_are_joined_in_order(api):
    assert _union(api, SPEC) == SPEC
    assert _union(api, {"ps": ["p:1"]}, {"worker": ["w:1"]}) == {
        "ps": ["p:1"],
        "worker": ["w:1"],
    }
    lists = [{"worker": ["b:1", "c:1"]}, {"worker": ["a:1"]}]
    assert _union(api, *lists) == {"worker": ["b:1", "c:1", "a:1"]}


@contract("R-11")
def test_dicts_are_merged_by_index(api):
    first = {"worker": {5: "f:1", 9: "j:1"}}
    assert _union(api, first) == first
    assert _union(api, first, {"worker": {3: "d:1"}}) == {
        "worker": {3: "d:1", 5: "f:1", 9: "j:1"}
    }
    # A list beside a dict is a dict.
    mixed = [{"worker": ["a:1", "b:1"]}, {"worker": {3: "d:1"}}]
    merged = {"worker": {0: "a:1", 1: "b:1", 3: "d:1"}}
    assert _union(api, *mixed) == _union(api, *mixed[::-1]) == merged


@contract("R-11")
@pytest.mark.parametrize(
    "specs",
    [
        [{"worker": {7: "a:1", 9: "b:1"}}, {"worker": {3: "c:1", 7: "d:1"}}],
        [{"worker": ["a:1", "b:1"]}, {"worker": {1: "c:1", 3: "d:1"}}],
        [{"worker": ["a:1"]}, {"worker": ["b:1"]}, {"worker": {3: "d:1"}}],
    ],
)
def test_a_task_given_twice(api, specs):
    for order in (specs, specs[::-1]):
        with pytest.raises(KeyError, match="Duplicate keys"):
            _union(api, *order)


@contract("R-11", native=False)
def test_an_empty_job_clashes_with_nothing(api):
    lists = [{"worker": ["a:1"]}, {"worker": []}, {"worker": ["b:1"]}]
    assert _union(api, *lists) == {"worker": ["a:1", "b:1"]}


@contract("R-12")
def test_the_rest_is_the_first_ones(api):
    first = _simple(
        api,
        SPEC,
        master="fixed:1",
        task_type="ps",
        task_id=1,
        environment="cloud",
        num_accelerators={"GPU": 8},
        rpc_layer="grpc",
    )
    second = _simple(
        api,
        {"worker": ["worker3:2222"]},
        task_type="worker",
        task_id=2,
        environment="local",
        num_accelerators={"GPU": 16},
        rpc_layer="http",
    )
    union = api.UnionResolver(first, second)
    assert (union.task_type, union.task_id) == ("ps", 1)
    assert (union.environment, union.rpc_layer) == ("cloud", "grpc")
    assert union.num_accelerators() == {"GPU": 8}
    assert union.master() == "grpc://fixed:1"
    assert union.master("worker", 3, "http") == "http://worker3:2222"
    union.task_type, union.task_id, union.rpc_layer = "worker", 2, "http"
    assert (union.task_type, union.task_id) == ("worker", 2)
    assert union.master("worker", 3) == "http://worker3:2222"


@contract("R-12", native=False)
def test_the_first_ones_protocol_is_for_all_addresses(api):
    union = api.UnionResolver(_simple(api, SPEC, rpc_layer="grpc"))
    assert union.master("worker", 0) == "grpc://worker0:2222"


@contract("R-12")
def test_keywords_come_before_the_first(api):
    first = _simple(api, SPEC, task_type="ps", task_id=1, rpc_layer="grpc")
    union = api.UnionResolver(
        first, task_type="worker", task_id=2, rpc_layer="http"
    )
    assert (union.task_type, union.task_id) == ("worker", 2)
    assert union.rpc_layer == "http"
    assert union.master("worker", 2) == "http://worker2:2222"


@contract("R-12")
def test_what_it_takes(api):
    with pytest.raises(ValueError, match="At least one ClusterResolver"):
        api.UnionResolver()
    with pytest.raises(ValueError, match="(?s)Unexpected k.*environment"):
        api.UnionResolver(_simple(api, SPEC), environment="x")
    with pytest.raises(TypeError, match="All arguments must be"):
        api.UnionResolver(_simple(api, SPEC), SPEC)


@contract("R-12", native=False)
def test_the_protocol_of_a_resolver_without_one(api):
    class Bare(api.ClusterResolver):
        def cluster_spec(self):
            return api.ClusterSpec(SPEC)

        def master(self, task_type=None, task_id=None, rpc_layer=None):
            return ""

    assert api.UnionResolver(Bare()).rpc_layer is None


@contract("R-13", native=False)
def test_task_0_is_honoured(api):
    first = _simple(api, SPEC, task_type="worker", task_id=1)
    assert api.UnionResolver(first, task_id=0).task_id == 0
    assert api.UnionResolver(first, task_id=2).task_id == 2
    union = api.UnionResolver(first)
    union.task_id = 0
    assert union.task_id == 0


def test_coordinator_and_restarts_are_the_first_ones():
    launched = KerasDistClusterResolver.reading(
        {"KERAS_DIST_COORDINATOR": "c:1", "KERAS_DIST_RESTARTS": "2"}
    )
    union = UnionResolver(launched)
    assert (union.coordinator, union.restarts) == ("c:1", 2)

"""Each task of a cluster knows its place, or hears why it has none."""

import pytest

from conformance.contract import contract
from keras_dist.cluster_resolver import ClusterSpec
from keras_dist.cluster_resolver import KerasDistClusterResolver
from keras_dist.cluster_resolver import SimpleClusterResolver
from keras_dist.cluster_resolver import cluster_of
from keras_dist.core.plan import Cluster
from keras_dist.errors import ClusterError

ALL = {
    "chief": ["c:1"],
    "worker": ["w:1", "w:2"],
    "ps": ["p:1", "p:2"],
    "evaluator": ["e:1"],
}
WORKERS = {"worker": ["w:1", "w:2"]}


def _cluster(spec, task_type=None, task_id=None):
    return cluster_of(
        SimpleClusterResolver(ClusterSpec(spec), "", task_type, task_id)
    )


def test_workers_in_order():
    two = ("w:1", "w:2")
    assert _cluster(WORKERS, "worker", 0) == Cluster(0, "w:1", two)
    assert _cluster(WORKERS, "worker", 1) == Cluster(1, "w:1", two)


@contract("R-22", native=False)
def test_the_chief_is_first():
    spec = {"worker": ["w:1", "w:2"], "chief": ["c:1"], "evaluator": ["e:1"]}
    three = ("c:1", "w:1", "w:2")
    assert _cluster(spec, "chief", 0) == Cluster(0, "c:1", three)
    assert _cluster(spec, "worker", 1) == Cluster(2, "c:1", three)


@pytest.mark.parametrize(
    ("spec", "task_type"),
    [
        ({}, None),
        ({}, "worker"),
        ({"worker": []}, None),
        ({"worker": ["w:1"]}, None),
        ({"worker": ["w:1"]}, "worker"),
        ({"chief": ["c:1"], "evaluator": ["e:1"]}, "chief"),
        (ALL, "evaluator"),
        (WORKERS, "evaluator"),
    ],
)
def test_a_process_that_works_alone(spec, task_type):
    assert _cluster(spec, task_type, 0) is None
    assert cluster_of(None) is None  # no resolver is no cluster


@contract("R-21", native=False)
@pytest.mark.parametrize(
    ("spec", "task", "message"),
    [
        (WORKERS, (None, None), "has 2 workers, but .* task_type=None"),
        (WORKERS, ("worker", None), "task_id=None from SimpleClusterResolver"),
        (WORKERS, ("worker", -1), "at least 0. Received: -1"),
        (WORKERS, ("worker", 2), "`task_id` 2 exceeds .*Expected: 0 to 1"),
        (WORKERS, ("boss", 0), "Unrecognized task_type: 'boss'"),
        (WORKERS, ("chief", 0), "'chief' not found in cluster_spec"),
        ({"chief": ["a:1", "b:1"]}, ("chief", 0), "at most one 'chief'"),
        ({"boss": ["a:1"], **WORKERS}, ("worker", 0), "Disallowed .*'boss'"),
        (ALL, ("worker", 0), "Parameter servers .*Leave out the job 'ps'"),
        (ALL, ("ps", 0), "Parameter servers"),
        (
            {"worker": {0: "a:1", 2: "c:1"}},
            ("worker", 0),
            "Task 1 of job 'worker' has no address",
        ),
        ({"worker": ["a:1", "a:1"]}, ("worker", 0), "Two workers .*'a:1'"),
        ({"worker": ["", "b:1"]}, ("worker", 1), "address of worker 0 must"),
        ({"chief": ["c"], **WORKERS}, ("chief", 0), "of chief 0 .*: 'c'"),
    ],
)
def test_what_workers_cannot_train_with(spec, task, message):
    with pytest.raises(ClusterError, match=f"(?s){message}"):
        _cluster(spec, *task)


WRONG = ["host", "host:", ":1", "host:0", "host:65536", "h o:1", "grpc://h:1"]


def test_addresses():
    for address in ("a.example:1", "10.0.0.1:65535", "[::1]:9000", "a_b-c:80"):
        found = _cluster({"worker": [address, ""]}, "worker", 1)
        assert found == Cluster(1, address, (address, ""))
    for address in [*WRONG, "::1"]:
        with pytest.raises(ClusterError, match="must be 'host:port'") as error:
            _cluster({"worker": ["a:1", address]}, "worker", 0)
        assert repr(address) in str(error.value)


EVERY_INTERFACE = ["0.0.0.0", "0", "0x0", "[::]", "[0::0]", "[::ffff:0.0.0.0]"]


@pytest.mark.parametrize("index", [0, 1])
def test_an_address_of_every_interface(index):
    """It is one to listen at, and none to connect to."""
    for host in EVERY_INTERFACE:
        addresses = ["a:1", "b:1"]
        addresses[index] = f"{host}:9000"
        told = rf"address of worker {index} .*Expected: .* 127\.0\.0\.1"
        with pytest.raises(ClusterError, match=f"(?s){told}") as error:
            _cluster({"worker": addresses}, "worker", 0)
        assert repr(addresses[index]) in str(error.value)


def test_coordinator_and_restarts_are_carried():
    variables = {
        "KERAS_DIST_WORKERS": "a:1,b:1",
        "KERAS_DIST_WORKER_INDEX": "1",
        "KERAS_DIST_COORDINATOR": "c:2",
        "KERAS_DIST_RESTARTS": "3",
        "KERAS_DIST_JOB": "a word",
    }
    assert cluster_of(KerasDistClusterResolver.reading(variables)) == Cluster(
        1, "a:1", ("a:1", "b:1"), "c:2", 3, "a word"
    )
    variables["KERAS_DIST_COORDINATOR"] = "nowhere"
    with pytest.raises(
        ClusterError, match="(?s)coordinator's address .*'nowhere'"
    ):
        cluster_of(KerasDistClusterResolver.reading(variables))


@contract("R-23")
def test_resolvers_of_the_original_are_taken(api):
    resolver = api.SimpleClusterResolver(
        api.ClusterSpec(WORKERS), task_type="worker", task_id=1
    )
    assert cluster_of(resolver) == Cluster(1, "w:1", ("w:1", "w:2"))

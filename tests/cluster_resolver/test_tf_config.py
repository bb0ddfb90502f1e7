"""`TFConfigClusterResolver` reads the cluster that TF_CONFIG describes."""

import json

import pytest

from conformance.contract import contract
from keras_dist.cluster_resolver import TFConfigClusterResolver
from keras_dist.errors import ClusterError

PAIR = {"worker": ["a:1", "b:2"]}


@pytest.fixture
def config(environ):
    """Sets TF_CONFIG."""

    def set_config(**config):
        environ["TF_CONFIG"] = json.dumps(config)

    return set_config


@contract("R-4")
def test_without_the_variable(api):
    resolver = api.TFConfigClusterResolver()
    assert resolver.master() == ""
    assert not resolver.cluster_spec()
    assert (resolver.task_type, resolver.task_id) == (None, None)
    assert resolver.rpc_layer is None


@contract("R-5")
def test_master_is_the_own_task(api, config):
    config(cluster=PAIR, task={"type": "worker", "index": 1})
    resolver = api.TFConfigClusterResolver()
    assert resolver.cluster_spec().as_dict() == PAIR
    assert resolver.master() == "b:2"
    config(cluster=PAIR, task={"type": "worker", "index": 0})
    assert resolver.master() == "a:1"


@contract("R-5")
def test_session_master_wins(api, config):
    task = {"type": "worker", "index": 0}
    config(cluster=PAIR, task=task, session_master="other:3", rpc_layer="grpc")
    assert api.TFConfigClusterResolver().master() == "other:3"


@contract("R-5")
def test_one_task_has_no_master(api, config):
    alone = {"worker": ["a:1"]}
    task = {"type": "worker", "index": 0}
    config(cluster=alone, task=task, rpc_layer="grpc")
    assert api.TFConfigClusterResolver().master() == ""
    config(cluster={**alone, "chief": ["b:2"]})
    assert api.TFConfigClusterResolver("chief", 0).master() == "b:2"


@contract("R-6")
def test_arguments_then_setters_then_the_call(api, config):
    config(
        cluster={**PAIR, "ps": ["c:3", "d:4"]},
        task={"type": "worker", "index": 1},
        rpc_layer="grpc",
    )
    resolver = api.TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.rpc_layer == "grpc"
    resolver = api.TFConfigClusterResolver("ps", 0, "http")
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)
    assert resolver.master() == "http://c:3"
    resolver.task_type, resolver.task_id = "worker", 0
    resolver.rpc_layer = "mpi"
    assert resolver.master() == "mpi://a:1"
    assert resolver.master("ps", 1) == "mpi://d:4"
    assert resolver.master("ps", 1, "grpc") == "grpc://d:4"
    assert resolver.master(task_id=1) == "mpi://b:2"


@contract("R-7")
def test_types_are_cast(api, config):
    config(cluster=PAIR, task={"type": 0, "index": "1"})
    resolver = api.TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id) == ("0", 1)
    resolver = api.TFConfigClusterResolver(1, "0")
    assert (resolver.task_type, resolver.task_id) == ("1", 0)


@contract("R-8")
def test_what_is_missing(api, config):
    config(cluster=PAIR)
    with pytest.raises(ValueError, match="No such job in cluster: None"):
        api.TFConfigClusterResolver().master()
    for index in (None, 2):
        task = {"type": "worker", "index": index}
        config(cluster=PAIR, task=task if index else {"type": "worker"})
        with pytest.raises(ValueError, match=f"No task with index {index}"):
            api.TFConfigClusterResolver().master()


@contract("R-8")
def test_bad_json_is_a_value_error(api, environ):
    environ["TF_CONFIG"] = "{'cluster': {}}"
    with pytest.raises(ValueError):
        api.TFConfigClusterResolver().cluster_spec()


@contract("R-8", native=False)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", r"variable TF_CONFIG is not JSON: .* Received: '\{'"),
        ("[1]", r"TF_CONFIG must be a JSON object .* Received: '\[1\]'"),
        ('{"cluster": []}', r"'cluster' in TF_CONFIG must be an object"),
        ('{"cluster": {"worker": 1}}', "cluster in TF_CONFIG can't be read"),
        ('{"task": "worker"}', "'task' in TF_CONFIG must be an object"),
        (
            '{"task": {"index": "one"}}',
            "index of the task in TF_CONFIG .*'one'",
        ),
    ],
)
def test_errors_name_the_variable(environ, value, message):
    environ["TF_CONFIG"] = value
    resolver = TFConfigClusterResolver()
    with pytest.raises(ClusterError, match=f"(?s){message}"):
        assert (resolver.cluster_spec(), resolver.task_id) is None


@contract("R-4", native=False)
@pytest.mark.parametrize("value", ["", " ", "{}"])
def test_an_empty_variable_is_none(environ, value):
    environ["TF_CONFIG"] = value
    resolver = TFConfigClusterResolver()
    assert not resolver.cluster_spec()
    assert resolver.task_type is None


@contract("R-9")
def test_environment_is_the_argument(api, config):
    config(cluster=PAIR, environment="cloud")
    assert not api.TFConfigClusterResolver().environment
    resolver = api.TFConfigClusterResolver(environment="here")
    assert resolver.environment == "here"

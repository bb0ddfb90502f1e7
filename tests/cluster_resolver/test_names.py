"""Resolvers have the names and the signatures of the original."""

import inspect

import pytest

from conformance.contract import contract
from keras_dist import cluster_resolver
from public_names import PUBLIC

NAMES = PUBLIC["keras_dist.cluster_resolver"]
RESOLVERS = [
    "SimpleClusterResolver",
    "TFConfigClusterResolver",
    "SlurmClusterResolver",
    "KubernetesClusterResolver",
    "TPUClusterResolver",
    "UnionResolver",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_an_example(name):
    assert "Example:" in getattr(cluster_resolver, name).__doc__


def _arguments(function):
    return ", ".join(
        str(p.replace(annotation=p.empty))
        if p.default is p.empty
        else f"{p.name}={getattr(p.default, 'name', p.default)!r}"
        for p in inspect.signature(function).parameters.values()
    )


@contract("R-1")
@pytest.mark.parametrize(
    ("name", "signature"),
    [
        (
            "SimpleClusterResolver",
            "cluster_spec, master='', task_type=None, task_id=None, "
            "environment='', num_accelerators=None, rpc_layer=None",
        ),
        (
            "TFConfigClusterResolver",
            "task_type=None, task_id=None, rpc_layer=None, environment=None",
        ),
        (
            "SlurmClusterResolver",
            "jobs=None, port_base={port_base}, gpus_per_node=None, "
            "gpus_per_task=None, tasks_per_node=None, auto_set_gpu=True, "
            "rpc_layer='grpc'",
        ),
        (
            "KubernetesClusterResolver",
            "job_to_label_mapping=None, tf_server_port=8470, "
            "rpc_layer='grpc', override_client=None, "
            "executable_location='WITHIN_CLUSTER'",
        ),
        (
            "TPUClusterResolver",
            "tpu=None, zone=None, project=None, job_name='worker', "
            "coordinator_name=None, coordinator_address=None, "
            "credentials='default', service=None, discovery_url=None",
        ),
        ("UnionResolver", "*args, **kwargs"),
    ],
)
def test_arguments(api, name, signature):
    # Ours computes ports from the job's id, so that jobs may share a node.
    own = api is cluster_resolver
    signature = signature.format(port_base=None if own else 8888)
    assert _arguments(getattr(api, name)) == signature


@contract("R-1")
@pytest.mark.parametrize("name", ["ClusterResolver", *RESOLVERS])
def test_arguments_of_methods(api, name):
    cls = getattr(api, name)
    assert _arguments(cls.cluster_spec) == "self"
    assert _arguments(cls.master) == (
        "self, task_type=None, task_id=None, rpc_layer=None"
    )
    assert _arguments(cls.num_accelerators) == (
        "self, task_type=None, task_id=None, config_proto=None"
    )

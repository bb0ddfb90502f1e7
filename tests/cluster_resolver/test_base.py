"""All resolvers count accelerators, and have a master and a task."""

import pytest

from conformance.contract import contract
from keras_dist.cluster_resolver import ClusterResolver
from keras_dist.cluster_resolver import ClusterSpec
from keras_dist.cluster_resolver import base
from keras_dist.core.device import Device
from keras_dist.plugin import backend


class _Two(ClusterResolver):
    def cluster_spec(self):
        return ClusterSpec({"worker": ["a:1", "b:1"]})

    def master(self, task_type=None, task_id=None, rpc_layer=None):
        return self.address_of(task_type, task_id, rpc_layer)


class _WithDevices:
    def __init__(self, *devices):
        self._devices = devices

    def list_devices(self):
        return self._devices


@contract("R-10", native=False)
def test_accelerators_of_this_worker_are_counted(monkeypatch):
    kinds = [("cpu", 0), ("gpu", 0), ("gpu", 1), ("tpu", 0)]
    devices = [Device(*each) for each in kinds]
    monkeypatch.setattr(base, "get_backend", lambda: _WithDevices(*devices))
    resolver = _Two()
    assert resolver.num_accelerators() == {"GPU": 2, "TPU": 1}
    assert resolver.num_accelerators()["NPU"] == 0
    resolver.task_type, resolver.task_id = "worker", 1
    assert resolver.num_accelerators("worker", 1) == {"GPU": 2, "TPU": 1}
    assert resolver.num_accelerators("worker", 0) == {}
    assert resolver.num_accelerators("worker") == {"GPU": 2, "TPU": 1}


@contract("R-10", native=False)
def test_the_backend_is_asked():
    counted = _Two().num_accelerators()
    assert sum(counted.values()) == sum(
        device.is_accelerator for device in backend.get_backend().list_devices()
    )


def test_devices_are_not_looked_for_before(monkeypatch):
    def fail():
        raise AssertionError("The backend was asked for.")

    monkeypatch.setattr(base, "get_backend", fail)
    resolver = _Two()
    resolver.task_type, resolver.task_id = "worker", 0
    assert resolver.master() == "a:1"
    assert (resolver.environment, resolver.rpc_layer) == ("", None)


def test_master_and_task():
    with pytest.raises(TypeError, match="abstract"):
        ClusterResolver()
    resolver = _Two()
    assert resolver.master() == resolver.master("worker") == ""
    assert resolver.master("worker", 1, "grpc") == "grpc://b:1"
    resolver.rpc_layer = "grpc"
    assert resolver.master("worker", 0) == "grpc://a:1"
    assert resolver.master("worker", 0, rpc_layer="") == "a:1"
    resolver.task_type, resolver.task_id = "worker", "1"
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)

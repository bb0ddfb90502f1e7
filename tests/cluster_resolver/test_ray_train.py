"""Workers that a trainer of Ray Train started find each other."""

import sys
from types import ModuleType
from types import SimpleNamespace

import pytest

from keras_dist.cluster_resolver import RayTrainClusterResolver
from keras_dist.cluster_resolver import cluster_of
from keras_dist.cluster_resolver import detect
from keras_dist.cluster_resolver import ray_train
from keras_dist.errors import ClusterError


class Ray:
    """Stands for what a worker sees of Ray.

    Args:
        monkeypatch: pytest's, which puts the modules in their places.
        rank: Integer, or `None` in a process that is no worker.
        size: Integer, the number of workers.
    """

    def __init__(self, monkeypatch, rank, size=3):
        self.told = []
        self._rank, self._size = rank, size
        modules = {
            "ray": {},
            "ray.train": {"get_context": self._context},
            "ray.train.collective": {"broadcast_from_rank_zero": self._tell},
            "ray.util": {"get_node_ip_address": lambda: "127.0.0.1"},
        }
        for name, contents in modules.items():
            module = ModuleType(name)
            vars(module).update(contents)
            monkeypatch.setitem(sys.modules, name, module)

    def _context(self):
        if self._rank is None:
            raise RuntimeError("cannot be used outside of a training function")
        return SimpleNamespace(
            get_world_rank=lambda: self._rank,
            get_world_size=lambda: self._size,
        )

    def _tell(self, data):
        self.told.append(data)
        return data or "10.0.0.1:9000"


@pytest.fixture(autouse=True)
def _no_address_is_known():
    ray_train._leader.cache_clear()
    yield
    ray_train._leader.cache_clear()


def test_a_worker_without_variables_is_found(monkeypatch, environ):
    ray = Ray(monkeypatch, rank=2)
    resolver, reason = detect()
    assert type(resolver) is RayTrainClusterResolver
    assert (
        reason == "this is a worker of Ray Train: 3 workers, this is worker 2"
    )
    cluster = cluster_of(resolver)
    assert (cluster.index, cluster.num_workers) == (2, 3)
    assert cluster.addresses == (cluster.leader, "", "")
    assert cluster.leader == "10.0.0.1:9000"
    # All workers take part in an exchange: once is enough.
    assert cluster_of(detect()[0]) == cluster
    assert ray.told == [None]


def test_the_first_worker_tells_its_address(monkeypatch, environ):
    ray = Ray(monkeypatch, rank=0)
    cluster = cluster_of(detect()[0])
    assert ray.told == [cluster.leader]
    host, _, port = cluster.leader.partition(":")
    assert host == "127.0.0.1"
    assert int(port) > 1023


def test_variables_come_first(monkeypatch, environ):
    ray = Ray(monkeypatch, rank=1, size=2)
    environ["KERAS_DIST_WORKERS"] = "a:9000,b:9000"
    environ["KERAS_DIST_WORKER_INDEX"] = "1"
    resolver, reason = detect()
    assert cluster_of(resolver).leader == "a:9000"
    assert reason.endswith("ignored: this is a worker of Ray Train")
    assert not ray.told


@pytest.mark.parametrize(("rank", "size"), [(None, 3), (0, 1), (0, None)])
def test_other_processes_are_alone(monkeypatch, environ, rank, size):
    Ray(monkeypatch, rank, size)
    assert detect()[0] is None


def test_other_variables_are_not_those_of_a_worker(monkeypatch):
    Ray(monkeypatch, rank=0)
    assert detect({})[0] is None


def test_outside_of_ray():
    with pytest.raises(ClusterError, match="not a worker of Ray Train"):
        RayTrainClusterResolver().cluster_spec()


def test_an_old_ray(monkeypatch, environ):
    Ray(monkeypatch, rank=0)
    monkeypatch.setitem(sys.modules, "ray.train.collective", None)
    with pytest.raises(ClusterError, match="Install a newer one, or set KERAS"):
        RayTrainClusterResolver().cluster_spec()

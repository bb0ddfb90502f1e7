"""`TPUStrategy` computes on the cores that hosts have, and names others."""

import keras
import numpy as np
import pytest

import keras_dist
from keras_dist.plugin.capabilities import HasTPUs
from keras_dist.plugin.capabilities import shards_on_devices
from keras_dist.plugins import Device
from keras_dist.plugins import get_backend
from keras_dist.plugins import override_backend
from keras_dist.testing import MemoryBackend
from keras_dist.tpu.experimental import DeviceAssignment
from keras_dist.tpu.experimental import Topology
from keras_dist.tpu.experimental import initialize_tpu_system

SPEC = {"worker": ["a:1", "b:1"]}
# Two hosts with a chip each, whose two cores are devices.
PLACES = [[(0, 0, 0, 0), (0, 0, 0, 1)], [(1, 0, 0, 0), (1, 0, 0, 1)]]


class TPUBackend(MemoryBackend, HasTPUs):
    """A backend of a host with as many cores as the others."""

    def __init__(self, places):
        count = len(places[0]) if places else 0
        cores = [Device("tpu", index) for index in range(count)]
        super().__init__([*cores, Device("cpu", 0)])
        self.places = places
        self.joined = []

    def join(self, cluster, options):
        self.joined.append(cluster)

    def tpu_places(self):
        return self.places


@pytest.fixture
def backend(request, monkeypatch):
    # What joins a cluster for good belongs to the process.
    module = "keras_dist.strategies.multi_worker_mirrored"
    monkeypatch.setattr(f"{module}.watch_exceptions", lambda: None)
    monkeypatch.setattr(f"{module}.note_joined", lambda: None)
    with override_backend(TPUBackend(request.param)) as made:
        yield made


one_host = pytest.mark.parametrize("backend", [PLACES[:1]], indirect=True)
two_hosts = pytest.mark.parametrize("backend", [PLACES], indirect=True)


def resolver(index=0):
    return keras_dist.cluster_resolver.SimpleClusterResolver(
        keras_dist.cluster_resolver.ClusterSpec(SPEC),
        task_type="worker",
        task_id=index,
    )


def assignment(places, num_cores=1):
    """An assignment of these cores, in this order."""
    topology = Topology(mesh_shape=[2, 1, 1, 2], device_coordinates=PLACES)
    return DeviceAssignment(
        topology, np.array(places).reshape(-1, num_cores, 4)
    )


@one_host
@pytest.mark.parametrize("name", [None, "local"])
def test_the_cores_of_this_host(backend, name):
    made = name and keras_dist.cluster_resolver.TPUClusterResolver(name)
    strategy = keras_dist.TPUStrategy(made)
    assert strategy.extended.worker_devices == ("tpu:0", "tpu:1")
    assert strategy.plan.cluster is None
    assert strategy.extended.num_hosts == 1
    assert repr(strategy) == "<TPUStrategy on tpu:0, tpu:1>"
    resolver_in_use = strategy.cluster_resolver
    assert resolver_in_use is made if made else not resolver_in_use.is_virtual
    topology = initialize_tpu_system(made)
    assert topology.mesh_shape.tolist() == [1, 1, 1, 2]
    assert topology.device_coordinates.tolist() == [[*map(list, PLACES[0])]]


@two_hosts
def test_the_cores_of_all_hosts(backend):
    strategy = keras_dist.TPUStrategy(resolver(1))
    assert strategy.plan.cluster.addresses == ("a:1", "b:1")
    assert strategy.plan.cluster.index == 1
    assert strategy.num_replicas_in_sync == 4
    assert strategy.extended.num_hosts == 2
    assert strategy.extended.num_replicas_per_host == 2
    assert not strategy.extended.should_checkpoint
    assert initialize_tpu_system(resolver(1)).num_tasks == 2
    assert backend.joined == [strategy.plan.cluster] * 2


HOSTS = {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}
LAUNCHED = {"KERAS_DIST_WORKERS": "c:1,d:1", "KERAS_DIST_WORKER_INDEX": "1"}


@two_hosts
@pytest.mark.parametrize(
    ("variables", "name", "addresses"),
    [
        (HOSTS, None, ("a:8482", "b:8482")),
        # The launcher comes first.
        (HOSTS | LAUNCHED, None, ("c:1", "d:1")),
        ({"TPU_WORKER_ID": "1"}, "grpc://a:1,grpc://b:1", ("a:1", "b:1")),
    ],
    ids=["variables", "launcher", "resolver"],
)
def test_what_names_hosts(backend, monkeypatch, variables, name, addresses):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    made = name and keras_dist.cluster_resolver.TPUClusterResolver(name)
    cluster = keras_dist.TPUStrategy(made).plan.cluster
    assert (cluster.addresses, cluster.index) == (addresses, 1)


@pytest.mark.parametrize(
    ("backend", "workers", "says"),
    [
        (PLACES, False, r"1 worker\(s\).*\[2, 2\] cores"),
        ([PLACES[0], PLACES[1][:1]], True, r"\[2, 1\] cores"),
    ],
    indirect=["backend"],
)
def test_hosts_that_are_not_those_of_the_workers(backend, workers, says):
    with pytest.raises(keras_dist.ClusterError, match=f"(?s){says}"):
        keras_dist.TPUStrategy(resolver() if workers else None)


@pytest.mark.parametrize("backend", [PLACES[:1] * 2], indirect=True)
def test_several_slices(backend):
    assert keras_dist.TPUStrategy(resolver()).num_replicas_in_sync == 4
    with pytest.raises(keras_dist.DeviceError, match="Several slices"):
        initialize_tpu_system(resolver())


ONE_HOST = Topology(mesh_shape=[1, 1, 1, 2], device_coordinates=PLACES[:1])


@one_host
def test_chosen_cores_of_a_host_in_their_order(backend):
    chosen = DeviceAssignment(ONE_HOST, np.array(PLACES[0][::-1])[:, None])
    strategy = keras_dist.TPUStrategy(None, chosen)
    assert strategy.extended.worker_devices == ("tpu:1", "tpu:0")


@two_hosts
def test_chosen_cores_of_hosts(backend):
    """The hosts have one order of their cores, whatever the ring's is."""
    ring = [PLACES[0][0], PLACES[1][1], PLACES[1][0], PLACES[0][1]]
    strategy = keras_dist.TPUStrategy(resolver(), assignment(ring))
    assert strategy.extended.worker_devices == ("tpu:0", "tpu:1")
    few = [PLACES[0][1], PLACES[1][1]]
    strategy = keras_dist.TPUStrategy(resolver(), assignment(few))
    assert strategy.extended.worker_devices == ("tpu:1",)
    assert strategy.num_replicas_in_sync == 2


@two_hosts
@pytest.mark.parametrize(
    "places",
    [
        pytest.param(PLACES[0], id="one host"),
        pytest.param([PLACES[0][0], PLACES[1][1]], id="other cores"),
        pytest.param([*PLACES[0], PLACES[1][0]], id="fewer cores"),
    ],
)
def test_cores_that_do_not_fit_the_hosts(backend, places):
    with pytest.raises(ValueError, match=r"(?s)cores by task.*tasks 0 to 1"):
        keras_dist.TPUStrategy(resolver(), assignment(places))


@one_host
def test_cores_that_a_host_does_not_have(backend):
    topology = Topology(
        mesh_shape=[3, 1, 1, 1],
        device_coordinates=[[[x, 0, 0, 0] for x in range(3)]],
    )
    built = DeviceAssignment.build(topology, num_replicas=3)
    with pytest.raises(
        keras_dist.DeviceError, match=r"(?s)'tpu:2'.*experimental_device_assign"
    ):
        keras_dist.TPUStrategy(None, built)
    twice = DeviceAssignment(topology, [[[0, 0, 0, 0]]] * 2)
    with pytest.raises(keras_dist.DeviceError, match="named 2 times"):
        keras_dist.TPUStrategy(None, twice)
    both = DeviceAssignment(ONE_HOST, np.array(PLACES[:1]))
    with pytest.raises(ValueError, match="2 logical devices for each replica"):
        keras_dist.TPUStrategy(None, both)
    with pytest.raises(ValueError, match="num_cores_per_replica=n"):
        keras_dist.TPUStrategy(layout_map={})
    with pytest.raises(
        TypeError, match=r"(?s)DeviceAssignment.*Received: \[0\]"
    ):
        keras_dist.TPUStrategy(None, [0])
    with pytest.raises(TypeError, match="(?s)cluster_resolver.*'a:9000'"):
        keras_dist.TPUStrategy("a:9000")


@pytest.mark.parametrize("backend", [[]], indirect=True)
def test_no_tpu(backend):
    for made in (keras_dist.TPUStrategy, initialize_tpu_system):
        with pytest.raises(
            keras_dist.DeviceError,
            match=r"Received: cpu:0\. Expected: tpu:0.*jax\[tpu\].*Mirrored",
        ):
            made()


def test_no_tpu_here():
    is_able = isinstance(get_backend(), HasTPUs)
    reason = "There is no TPU here" if is_able else "KERAS_BACKEND=jax"
    if keras.backend.backend() == "tensorflow":
        reason = f"{reason}.*one program for all cores"
    for made in (keras_dist.TPUStrategy, initialize_tpu_system):
        with pytest.raises(keras_dist.DeviceError, match=f"(?s){reason}"):
            made()


def test_the_older_spelling():
    stand_in = keras_dist.cluster_resolver.TPUClusterResolver("virtual")
    with pytest.warns(DeprecationWarning, match=r"keras_dist\.TPUStrategy"):
        strategy = keras_dist.experimental.TPUStrategy(stand_in)
    assert isinstance(strategy, keras_dist.TPUStrategy)


def test_an_environment_variable_asks_for_cpu_devices(monkeypatch):
    monkeypatch.setenv("TPU_NAME", "virtual")
    for stand_in in (None, keras_dist.cluster_resolver.TPUClusterResolver()):
        strategy = keras_dist.TPUStrategy(stand_in)
        assert strategy.extended.worker_devices == tuple(
            keras_dist.list_devices("cpu")
        )
        assert strategy.cluster_resolver.is_virtual


MESHES = {
    **{1: [1, 1, 1, 1], 2: [1, 1, 1, 2], 3: [1, 3, 1, 1]},
    **{4: [2, 1, 1, 2], 6: [1, 3, 1, 2], 8: [2, 2, 1, 2]},
}


@pytest.mark.parametrize("count", MESHES)
def test_cpu_devices_have_the_mesh_of_a_host(count):
    cpus = [Device("cpu", index) for index in range(count)]
    stand_in = keras_dist.cluster_resolver.TPUClusterResolver("virtual")
    with override_backend(MemoryBackend([Device("gpu", 0), *cpus])):
        topology = initialize_tpu_system(stand_in)
        strategy = keras_dist.TPUStrategy(stand_in)
    assert topology.mesh_shape.tolist() == MESHES[count]
    assert not topology.missing_devices.size
    assert strategy.num_replicas_in_sync == count


def test_it_shards_as_a_mirrored_strategy_does():
    stand_in = keras_dist.cluster_resolver.TPUClusterResolver("virtual")
    with pytest.raises(ValueError, match="'mirrored' or 'sharded'"):
        keras_dist.TPUStrategy(stand_in, optimizer_state="shard")
    if shards_on_devices(get_backend()):
        strategy = keras_dist.TPUStrategy(stand_in, variables="sharded")
        assert strategy.plan.shards_variables
    else:
        with pytest.raises(ValueError, match="Received: variables='sharded'"):
            keras_dist.TPUStrategy(stand_in, variables="sharded")

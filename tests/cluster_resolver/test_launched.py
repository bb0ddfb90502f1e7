"""Workers of `keras-dist run`, torchrun and MPI find each other."""

import pytest

from keras_dist.cluster_resolver import KerasDistClusterResolver
from keras_dist.cluster_resolver import MPIClusterResolver
from keras_dist.cluster_resolver import TorchrunClusterResolver
from keras_dist.cluster_resolver import cluster_of
from keras_dist.core.plan import Cluster
from keras_dist.environment import machine
from keras_dist.errors import ClusterError

LAUNCHED = {
    "KERAS_DIST_WORKERS": "a:9000, b:9001",
    "KERAS_DIST_WORKER_INDEX": "1",
}
TORCHRUN = {
    "RANK": "2",
    "WORLD_SIZE": "3",
    "LOCAL_WORLD_SIZE": "3",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
HERE = {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-7@1"}
LEADER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "9000"}


IN_MPI = LEADER | {"PMI_RANK": "5", "PMI_SIZE": "6"}
IN_OPEN_MPI = LEADER | OPEN_MPI
SECOND_OF_MPI = {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SECOND_OF_OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.mark.parametrize(
    "make, variables, seen, own",
    [
        (TorchrunClusterResolver, {"LOCAL_RANK": "2"}, 3, "2"),
        (TorchrunClusterResolver, {"LOCAL_RANK": "0"}, 8, "0,1"),
        # The launcher, or the user, has chosen.
        (TorchrunClusterResolver, {"LOCAL_RANK": "2"}, "7,5,3", "3"),
        (TorchrunClusterResolver, {"LOCAL_RANK": "2"}, "7", "7"),
        (TorchrunClusterResolver, {"LOCAL_RANK": "2"}, "-1", "-1"),
        # They share one, or there is none.
        (TorchrunClusterResolver, {"LOCAL_RANK": "2"}, 2, None),
        (TorchrunClusterResolver, {"LOCAL_RANK": "2"}, 0, None),
        (MPIClusterResolver, IN_OPEN_MPI | SECOND_OF_OPEN_MPI, 4, "2,3"),
        (MPIClusterResolver, IN_MPI | SECOND_OF_MPI, 2, "1"),
        (MPIClusterResolver, IN_MPI, 2, None),
    ],
)
def test_each_worker_takes_its_own_gpus(
    environ, monkeypatch, make, variables, seen, own
):
    if make is TorchrunClusterResolver:
        variables = TORCHRUN | variables
    environ.update(variables)
    environ.pop("CUDA_VISIBLE_DEVICES", None)
    if isinstance(seen, str):
        environ["CUDA_VISIBLE_DEVICES"] = seen
    monkeypatch.setattr(machine, "listed_gpus", lambda: (int(seen), None))
    for _ in range(2):  # the second one finds what the first one has set
        make().cluster_spec()
        assert environ.get("CUDA_VISIBLE_DEVICES") == own


def _spec(resolver, *addresses):
    return resolver.cluster_spec() == {"worker": list(addresses)}


def test_keras_dist_run(environ):
    environ.update(LAUNCHED)
    resolver = KerasDistClusterResolver()
    assert _spec(resolver, "a:9000", "b:9001")
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.master() == "b:9001"
    assert resolver.master("worker", 0, "grpc") == "grpc://a:9000"
    assert (resolver.coordinator, resolver.restarts) == (None, 0)
    environ.update(KERAS_DIST_COORDINATOR="c:1", KERAS_DIST_RESTARTS="2")
    assert (resolver.coordinator, resolver.restarts) == ("c:1", 2)
    assert resolver.job == ""
    environ["KERAS_DIST_JOB"] = "a word"
    assert cluster_of(resolver).job == "a word"
    resolver.task_id = 0
    assert resolver.master() == "a:9000"


def test_torchrun_on_one_host(environ):
    environ.update(TORCHRUN)
    resolver = TorchrunClusterResolver()
    addresses = tuple(f"127.0.0.1:{13552 + i}" for i in range(3))
    first = cluster_of(resolver)
    assert first == Cluster(2, addresses[0], addresses, job=first.job)
    environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    assert cluster_of(resolver).restarts == 1
    assert cluster_of(resolver).job != first.job


@pytest.mark.parametrize("number", [1, 2, 3, 8, 64])
def test_jobs_of_torchrun_on_one_host_share_no_port(number):
    """Theirs are next to each other, and none is torchrun's own."""
    taken = set()
    for port in range(29400, 29532):
        size = str(number)
        variables = {
            **{"RANK": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        }
        found = TorchrunClusterResolver.reading(variables).addresses()
        ports = {int(address.rpartition(":")[2]) for address in found}
        assert not ports & taken
        assert min(ports) >= 10240
        assert max(ports) < 26624
        taken |= ports


@pytest.mark.parametrize("local", [{"LOCAL_WORLD_SIZE": "2"}, {}])
def test_torchrun_on_several_hosts(local):
    kept = {k: v for k, v in TORCHRUN.items() if "LOCAL" not in k} | local

    def read(**more):
        variables = kept | {"MASTER_ADDR": "head"} | more
        return cluster_of(TorchrunClusterResolver.reading(variables))

    assert read().addresses == ("head:23356", "", "")
    assert int(read().leader.split(":")[1]) == 10240 + 29500 % 16384
    # Agents of other hosts may have counted other restarts.
    assert read(TORCHELASTIC_RESTART_COUNT="1").job == read().job
    other = read(TORCHELASTIC_RUN_ID="search-7").job
    assert "'search-7'" in other
    assert other != read().job
    variables = TORCHRUN | {"MASTER_ADDR": "::1"}
    resolver = TorchrunClusterResolver.reading(variables)
    assert cluster_of(resolver).leader == "[::1]:13552"


def test_open_mpi_on_this_host(environ):
    environ.update(OPEN_MPI | HERE)
    first, second = MPIClusterResolver().addresses()
    host, port = first.split(":")
    assert host == "127.0.0.1"
    assert 10240 <= int(port) < 26624
    assert second == f"127.0.0.1:{int(port) + 1}"
    assert MPIClusterResolver().task_id == 1
    environ["OMPI_COMM_WORLD_RANK"] = "0"
    assert MPIClusterResolver().addresses() == [first, second]
    assert MPIClusterResolver().job == "MPI job prterun-7@1"
    environ["PMIX_NAMESPACE"] = "prterun-8@1"
    assert MPIClusterResolver().addresses() != [first, second]
    assert MPIClusterResolver().job == "MPI job prterun-8@1"
    environ.update(LEADER)
    assert MPIClusterResolver().addresses() == [
        "10.0.0.1:9000",
        "10.0.0.1:9001",
    ]


@pytest.mark.parametrize("name", ["PMI", "OMPI_COMM_WORLD"])
def test_mpi_on_several_hosts(name):
    resolver = MPIClusterResolver.reading(
        {f"{name}_RANK": "1", f"{name}_SIZE": "2", **LEADER}
    )
    assert cluster_of(resolver) == Cluster(
        1, "10.0.0.1:9000", ("10.0.0.1:9000", "")
    )


LAUNCHED_MISREAD = [
    ({"KERAS_DIST_WORKERS": ""}, "_WORKERS is not set. .*-dist r"),
    ({"KERAS_DIST_WORKERS": "a:1,,b:1"}, "separated by commas.*'a:1,,b:1'"),
    ({"KERAS_DIST_WORKER_INDEX": ""}, "_WORKER_INDEX is not set"),
    ({"KERAS_DIST_WORKER_INDEX": "-1"}, "integer of at least 0.*'-1'"),
    ({"KERAS_DIST_WORKER_INDEX": "2"}, "names 2 workers.*Expected: 0 to 1"),
    ({"KERAS_DIST_RESTARTS": "once"}, "_RESTARTS must be .*'once'"),
]
TORCHRUN_MISREAD = [
    ({"RANK": "3"}, "RANK=3 does not fit WORLD_SIZE=3.*0 to 2"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be an integer of at least 1"),
    ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set. .* torchrun"),
    ({"MASTER_PORT": "http"}, "MASTER_PORT must be .* 1 to 65535.*'http'"),
]
LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"
MPI_MISREAD = [
    (OPEN_MPI, "2 workers, but does not say where .*MASTER_ADDR"),
    (OPEN_MPI | {LOCAL_SIZE: "1", "PMI_JOBID": "1"}, "where they meet"),
    (OPEN_MPI | {LOCAL_SIZE: "2"}, "job has an id"),
    (OPEN_MPI | {"MASTER_ADDR": "a"}, "where they meet"),
    (OPEN_MPI | {"MASTER_PORT": "1"}, "where they meet"),
    (
        IN_OPEN_MPI | {"MASTER_PORT": "65535"} | HERE,
        "MASTER_PORT=65535 with 2 .*port 65536",
    ),
    (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"}, "_RANK=2 does not fit"),
    ({"PMI_RANK": "0"}, "PMI_SIZE is not set. .* mpirun"),
    ({"PMIX_RANK": "0"}, "PMIX_RANK is set, but"),
    ({}, "rank and size are not set.*OMPI_COMM_WORLD_RANK and"),
]


@pytest.mark.parametrize(
    ("cls", "right", "misread"),
    [
        (KerasDistClusterResolver, LAUNCHED, LAUNCHED_MISREAD),
        (TorchrunClusterResolver, TORCHRUN, TORCHRUN_MISREAD),
        (MPIClusterResolver, {}, MPI_MISREAD),
    ],
)
def test_variables_that_can_not_be_read(cls, right, misread):
    for variables, message in misread:
        with pytest.raises(ClusterError, match=f"(?s){message}"):
            cluster_of(cls.reading(right | variables))

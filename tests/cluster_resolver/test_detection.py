"""The variables of the environment say which cluster a process is of."""

import json

import pytest

from keras_dist.cluster_resolver import KerasDistClusterResolver
from keras_dist.cluster_resolver import MPIClusterResolver
from keras_dist.cluster_resolver import SlurmClusterResolver
from keras_dist.cluster_resolver import TFConfigClusterResolver
from keras_dist.cluster_resolver import TorchrunClusterResolver
from keras_dist.cluster_resolver import cluster_of
from keras_dist.cluster_resolver import detect
from keras_dist.errors import ClusterError


def _tf_config(workers, task_type, index):
    cluster = {"worker": [f"w:{i + 1}" for i in range(workers)]}
    task = {"type": task_type, "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


LAUNCHED = {
    "KERAS_DIST_WORKERS": "a:9000,b:9000,c:9000",
    "KERAS_DIST_WORKER_INDEX": "2",
}
TORCHRUN = {
    "RANK": "2",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_GPUS_ON_NODE": "0",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "29500",
}
IN_ORDER = [
    (KerasDistClusterResolver, LAUNCHED, "KERAS_DIST_WORKERS is set"),
    (
        TFConfigClusterResolver,
        _tf_config(3, "worker", 2),
        "TF_CONFIG is set",
    ),
    (
        TorchrunClusterResolver,
        TORCHRUN,
        "torchrun's RANK and WORLD_SIZE are set",
    ),
    (
        SlurmClusterResolver,
        SLURM,
        "SLURM_PROCID is set in a step of several tasks",
    ),
    (
        MPIClusterResolver,
        MPI,
        "MPI's OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE are set",
    ),
]


PMI = {"PMI_RANK": "2", "PMI_SIZE": "3"}


@pytest.mark.parametrize(
    ("cls", "variables", "found"),
    [
        *IN_ORDER,
        (MPIClusterResolver, PMI, "MPI's PMI_RANK and PMI_SIZE are set"),
    ],
)
def test_each_alone(cls, variables, found):
    resolver, reason = detect(dict(variables))
    assert type(resolver) is cls
    assert reason == f"{found}: 3 workers, this is worker 2"
    if variables is not PMI:  # which says nothing of where they meet
        cluster = cluster_of(resolver)
        assert (cluster.index, cluster.num_workers) == (2, 3)


# Where mpirun starts workers in a step of Slurm, only it knows their places.
@pytest.mark.parametrize("among", [IN_ORDER[:4], IN_ORDER[:3] + IN_ORDER[4:]])
@pytest.mark.parametrize("first", range(4))
def test_the_first_wins(among, first):
    variables = {}
    for _, more, _ in reversed(among[first:]):
        variables |= more
    resolver, reason = detect(variables)
    assert type(resolver) is among[first][0]
    assert reason == "; ignored: ".join(
        [
            f"{among[first][2]}: 3 workers, this is worker 2",
            *(found for _, _, found in among[first + 1 :]),
        ]
    )


def test_mpirun_in_a_step_of_slurm():
    resolver, _ = detect({**SLURM, "SLURM_PROCID": "0", **MPI})
    assert type(resolver) is MPIClusterResolver
    assert cluster_of(resolver).index == 2


def test_the_first_wins_against_another_that_contradicts_or_is_wrong():
    resolver, reason = detect({**LAUNCHED, **_tf_config(2, "worker", 0)})
    assert cluster_of(resolver).index == 2
    assert reason == (
        "KERAS_DIST_WORKERS is set: 3 workers, this is worker 2; ignored: "
        "TF_CONFIG is set, which contradicts it (2 workers, this is worker 0)"
    )
    resolver, reason = detect({**LAUNCHED, "TF_CONFIG": "{"})
    assert cluster_of(resolver).index == 2
    assert "ignored: TF_CONFIG is set, which contradicts it (it" in reason
    assert "TF_CONFIG is not JSON" in reason


ALONE = "no variables of a cluster are set: this is the only worker"


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({}, ALONE),
        ({"TF_CONFIG": ""}, ALONE),
        ({"KERAS_DIST_WORKERS": ""}, ALONE),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ALONE),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, ALONE),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, ALONE),
        ({"PMIX_RANK": "0"}, ALONE),
        (
            {"TF_CONFIG": '{"environment": "cloud"}'},
            f"{ALONE} (TF_CONFIG is set, but it has no cluster)",
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
            f"{ALONE} (SLURM_NTASKS is 4, but this process is not a task of "
            "a Slurm step: start the script with `srun`)",
        ),
    ],
)
def test_no_cluster(variables, reason):
    assert detect(variables) == (None, reason)


def test_a_config_without_a_cluster_leaves_it_to_the_next():
    resolver, _ = detect({"TF_CONFIG": "{}", **TORCHRUN})
    assert type(resolver) is TorchrunClusterResolver


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        (_tf_config(1, "worker", 0), "1 worker, this is worker 0"),
        (
            _tf_config(2, "evaluator", 0),
            "this is the evaluator, which works alone",
        ),
    ],
)
def test_a_cluster_in_which_this_process_is_alone(variables, told):
    resolver, reason = detect(variables)
    assert reason == f"TF_CONFIG is set: {told}"
    assert cluster_of(resolver) is None


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"KERAS_DIST_WORKERS": "a:1,b:1"}, "WORKER_INDEX is not set"),
        ({"TF_CONFIG": "{"}, "TF_CONFIG is not JSON"),
        (_tf_config(2, None, None), "not known which of them"),
        (TORCHRUN | {"RANK": "3"}, "RANK=3 does not fit WORLD_SIZE=3"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "x"}, "NUM_TASKS must be an integer"),
        (MPI | {"OMPI_COMM_WORLD_RANK": ""}, "COMM_WORLD_RANK is not set"),
    ],
)
def test_variables_that_cannot_be_read(variables, message):
    with pytest.raises(ClusterError, match=f"(?s){message}"):
        detect(dict(variables))


def test_the_process_own_variables_are_the_default(environ):
    assert detect() == (None, ALONE)
    environ.update(LAUNCHED)
    resolver, _ = detect()
    assert resolver.master() == "c:9000"

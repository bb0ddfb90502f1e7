"""Launchers start two workers, whose weights are those of one device."""

import json
import sys

import pytest

from keras_dist.launch.addresses import free_addresses
from launchers import programs
from ports import free_block

on_each_backend = pytest.mark.parametrize("backend", programs.BACKENDS)
PROGRAM = (sys.executable, "digits.py")


@on_each_backend
def test_slurm(slurm, check, tmp_path, backend):
    output = programs.run(
        ["srun", "--ntasks=2", "--kill-on-bad-exit=1", *PROGRAM],
        tmp_path,
        KERAS_BACKEND=backend,
        **slurm.variables,
    )
    assert "SLURM_PROCID is set in a step of several tasks" in output
    check(output, backend)


@on_each_backend
def test_open_mpi(check, tmp_path, backend):
    output = programs.run(
        # Open MPI starts no program as root, unless it is told to.
        [programs.require("mpirun"), "--allow-run-as-root", "-n", 2, *PROGRAM],
        tmp_path,
        KERAS_BACKEND=backend,
    )
    assert "MPI's OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE" in output
    check(output, backend)


@on_each_backend
def test_torchrun(check, tmp_path, backend):
    output = programs.run(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nproc-per-node", 2, "--master-addr", "127.0.0.1"),
            *("--master-port", free_block(3), "digits.py"),
        ],
        tmp_path,
        KERAS_BACKEND=backend,
    )
    assert "torchrun's RANK and WORLD_SIZE are set" in output
    check(output, backend)


@on_each_backend
def test_tf_config_by_hand(check, tmp_path, backend):
    cluster = {"worker": free_addresses(2)}
    workers = [
        programs.start(
            PROGRAM,
            tmp_path,
            KERAS_BACKEND=backend,
            TF_CONFIG=json.dumps(
                {"cluster": cluster, "task": {"type": "worker", "index": index}}
            ),
        )
        for index in range(2)
    ]
    output = "".join([programs.output_of(worker) for worker in workers])
    assert "TF_CONFIG is set: 2 workers" in output
    check(output, backend)

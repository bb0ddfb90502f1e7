"""Runs programs under launchers, and reads the weights that they leave."""

import io
import os
import pathlib
import re
import shutil
import subprocess
import zipfile

import h5py
import numpy as np
import pytest

HERE = pathlib.Path(__file__).parent
# Seconds that a program may take, with the start of Ray.
LIMIT = 300
# What has to be installed for a command or a module.
PACKAGES = {
    "mpirun": "Debian's package openmpi-bin",
    "munged": "Debian's package munge",
    "ray": "ray[train] from PyPI",
    "slurmctld": "Debian's package slurm-wlm",
    "slurmd": "Debian's package slurm-wlm",
    "srun": "Debian's package slurm-wlm",
}
BACKENDS = ("jax", "tensorflow", "torch")


def require(command):
    """Returns a command's path; the test fails if it is not installed."""
    found = shutil.which(command) or shutil.which(f"/usr/sbin/{command}")
    if found is None:
        pytest.fail(
            f"`{command}` is not installed. Install {PACKAGES[command]}, or "
            "choose other tests with -k.",
            pytrace=False,
        )
    return found


def start(command, folder, **variables):
    """Starts a command among the programs; returns the process."""
    for path in HERE.glob("[a-z]*.py"):
        shutil.copy(path, folder)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(folder), os.environ.get("PYTHONPATH", "")]
        ),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **variables,
    }
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def output_of(process):
    """Returns what a process writes; the test fails if it fails."""
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        pytest.fail(f"No end within {LIMIT} seconds:\n{output[-6000:]}")
    assert process.returncode == 0, output[-6000:]
    return output


def run(command, folder, **variables):
    """Runs a command among the programs; returns what it writes."""
    return output_of(start(command, folder, **variables))


def shown_weights(output):
    """Returns the hashes of weights that two workers printed."""
    return re.findall(r"\b2 replicas, weights ([0-9a-f]{16})", output)


def weights(path):
    """Returns the arrays in a model's file by their names."""
    arrays = {}

    def note(name, item):
        if isinstance(item, h5py.Dataset):
            arrays[name] = np.asarray(item)

    with zipfile.ZipFile(path) as archive:
        content = io.BytesIO(archive.read("model.weights.h5"))
    with h5py.File(content) as file:
        file.visititems(note)
    assert len(arrays) >= 4
    return arrays


def check_equal(found, expected):
    """Checks that two models' arrays differ by at most 1e-5."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-5)

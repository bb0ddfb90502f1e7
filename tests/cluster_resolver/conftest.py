"""Ours, and on TensorFlow the original too; a process without a cluster."""

import os
from unittest import mock

import keras
import pytest

from keras_dist import cluster_resolver

_PREFIXES = (
    "CUDA_VISIBLE",
    "KERAS_DIST_COORDINATOR",
    "KERAS_DIST_JOB",
    "KERAS_DIST_RESTARTS",
    "KERAS_DIST_WORKER",
    "KUBE_GOOGLE",
    "LOCAL_",
    "MASTER_",
    "MPI_",
    "OMPI_",
    "PMI",
    "POD_NAME",
    "RANK",
    "SLURM_",
    "TF_CONFIG",
    "TORCHELASTIC",
    "TPU_",
    "WORLD_SIZE",
)


def pytest_generate_tests(metafunc):
    if "api" not in metafunc.fixturenames:
        return
    mark = metafunc.definition.get_closest_marker("contract")
    original_too = mark is not None and mark.kwargs["native"]
    names = ["keras_dist"]
    if keras.backend.backend() == "tensorflow" and original_too:
        names.append("native")
    metafunc.parametrize("api", names, indirect=True)


@pytest.fixture
def api(request):
    """`keras_dist.cluster_resolver`, or the original."""
    if request.param == "keras_dist":
        return cluster_resolver
    from cluster_resolver import native

    return native


@pytest.fixture(autouse=True)
def environ():
    """The environment without a cluster; it is as it was after a test."""
    with mock.patch.dict(os.environ):
        for name in list(os.environ):
            if name.startswith(_PREFIXES):
                del os.environ[name]
        yield os.environ

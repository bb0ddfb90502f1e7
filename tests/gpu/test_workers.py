"""Two worker processes that share one GPU have the numbers of one."""

import os

import keras
import pytest

import keras_dist
from gpu import models
from gpu import numbers
from gpu import places
from gpu import worker_jobs
from keras_dist.errors import ClusterError

BACKEND = keras.backend.backend()
# PyTorch finds out by itself that NCCL can't be used.
IMPLEMENTATIONS = {"torch": "AUTO", "tensorflow": "RING"}
NO_SHARING = (
    "JAX's processes exchange values of GPUs by NCCL only, which refuses two "
    "processes on one GPU."
)
NO_PARTS = "The TensorFlow backend refuses to keep parts on each worker."


@pytest.mark.skipif(
    BACKEND == "jax" and not places.IS_REHEARSAL, reason=NO_SHARING
)
@pytest.mark.parametrize(
    ("kind", "state"),
    [*((kind, "mirrored") for kind in models.KINDS), ("mlp", "sharded")],
)
def test_fit_of_two_workers_on_one_gpu(kind, state, monkeypatch):
    """Numbers are those of one process, with uneven batches."""
    if BACKEND == "tensorflow" and state == "sharded":
        pytest.skip(NO_PARTS)
    if not places.IS_REHEARSAL:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", _first_gpu())
    found = keras_dist.launch(
        worker_jobs.fit,
        (kind, IMPLEMENTATIONS.get(BACKEND, "AUTO"), state),
        workers=2,
        devices=1 if places.IS_REHEARSAL else None,
        timeout=400,
    )
    with numbers.plain_keras():
        expected = numbers.state_of(*numbers.trained(None, kind))
    for state, devices in found:
        assert devices == [places.DEVICE]
        numbers.assert_same(state, expected)


@pytest.mark.skipif(BACKEND != "torch", reason="It is about gloo.")
@pytest.mark.skipif(places.IS_REHEARSAL, reason="CPUs need no NCCL.")
def test_workers_that_share_a_gpu_cannot_shard_variables(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", _first_gpu())
    with pytest.raises(ClusterError, match="need NCCL to keep variables"):
        keras_dist.launch(worker_jobs.sharded, workers=2, timeout=400)


def _first_gpu():
    """Returns the name of a GPU, one that this process may use itself."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]

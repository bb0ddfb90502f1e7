"""Two worker processes that share one GPU."""

import os

import keras
import pytest

import keras_dist
from gpu import models
from gpu import numbers
from gpu import places
from gpu import worker_jobs

BACKEND = keras.backend.backend()
# PyTorch finds out by itself that NCCL can't be used.
IMPLEMENTATIONS = {"torch": "AUTO", "tensorflow": "RING"}
NO_SHARING = (
    "JAX's processes exchange values of GPUs by NCCL only, which refuses two "
    "processes on one GPU."
)
NO_PARTS = "The TensorFlow backend refuses sharded variables."


@pytest.mark.skipif(
    BACKEND == "jax" and not places.IS_REHEARSAL, reason=NO_SHARING
)
@pytest.mark.parametrize("kind", models.KINDS)
def test_fit_of_two_workers_on_one_gpu(kind, monkeypatch):
    """Numbers are those of one process, with uneven batches."""
    if not places.IS_REHEARSAL:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", _first_gpu())
    found = keras_dist.launch(
        worker_jobs.fit,
        (kind, IMPLEMENTATIONS.get(BACKEND, "AUTO")),
        workers=2,
        devices=1 if places.IS_REHEARSAL else None,
        timeout=400,
    )
    with numbers.plain_keras():
        expected = numbers.state_of(*numbers.trained(None, kind))
    for state, devices in found:
        assert devices == [places.DEVICE]
        numbers.assert_same(state, expected)


@pytest.mark.skipif(BACKEND == "tensorflow", reason=NO_PARTS)
@pytest.mark.skipif(
    BACKEND == "jax" and not places.IS_REHEARSAL, reason=NO_SHARING
)
@pytest.mark.parametrize("kind", models.KINDS)
def test_sharded_variables_of_two_workers(kind, monkeypatch):
    """Each keeps a part of the variables on the GPU that they share."""
    if not places.IS_REHEARSAL:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", _first_gpu())
    found = keras_dist.launch(
        worker_jobs.fit_sharded,
        (kind,),
        workers=2,
        devices=1 if places.IS_REHEARSAL else None,
        timeout=400,
    )
    with numbers.plain_keras():
        model, history = numbers.trained(None, kind)
    expected = numbers.weights_of(model, history)
    for state, devices in found:
        assert devices == [places.DEVICE]
        numbers.assert_same(state, expected)


def _first_gpu():
    """Returns the name of a GPU, one that this process may use itself."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]

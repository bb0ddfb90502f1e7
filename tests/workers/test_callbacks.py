"""Callbacks on several workers: who writes, and that all decide the same."""

import functools
import tempfile

import keras
import numpy as np
import pytest

from conformance.contract import contract
from workers import callback_jobs
from workers import clusters
from workers.callback_jobs import ROWS

# They share one job.
pytestmark = pytest.mark.runs_on("torch")


@functools.cache
def seen():
    with tempfile.TemporaryDirectory() as folder:
        return clusters.run(
            callback_jobs.everything,
            (folder,),
            workers=2,
            devices=1,
            timeout=400,
        )


def part(name):
    """What each worker found."""
    found = [results[name] for results in seen()]
    for worker, each in enumerate(found):
        is_error = isinstance(each, str) and name not in EXPECTED_ERRORS
        assert not is_error, f"worker {worker}: {each}"
    return found


EXPECTED_ERRORS = callback_jobs.DISAGREEMENTS


def test_only_the_chief_shows_progress():
    chief, other = part("shown_and_written")
    assert "Epoch 2/2" in chief["shown"]
    assert "saving model to" in chief["shown"]
    assert other["shown"] == ""


@contract(227, native=False)
def test_only_the_chief_writes():
    chief, other = part("shown_and_written")
    assert set(chief["files"]) == {
        "1.keras",
        "2.keras",
        "last.weights.h5",
        "latest.weights.h5",
        "log.csv",
        "more.csv",
        "saved.keras",
        "saved.weights.h5",
        "step.weights.h5",
        "training_metadata.json",
    }
    assert other["files"] == []
    assert chief["loaded"] == chief["weights"] == other["weights"]


def test_own_callbacks_run_on_every_worker():
    chief, other = part("shown_and_written")
    assert [epoch for epoch, _ in chief["own"]] == [0, 1]
    assert chief["own"] == other["own"]
    assert chief["batches"] == other["batches"] == [0, 1, 2, 3] * 2


@pytest.mark.parametrize("worker", [0, 1])
def test_one_worker_that_stops_stops_all(worker):
    assert part(f"stopped_by_one {worker}") == [2, 2]


@pytest.mark.parametrize("worker", [0, 1])
def test_the_chiefs_learning_rate_counts(worker):
    chief, other = part(f"learning_rate_of {worker}")
    assert chief == other
    assert chief[0] == pytest.approx(0.05 if worker else 0.125)


def test_random_states_are_shared_by_the_strategy():
    chief, other = part("drawn")
    assert chief == other


def test_other_methods_on_workers_are_told_with_their_lines():
    for error in part("method"):
        assert error.startswith("ReplicaDivergenceError: Workers are at diff")
        assert "worker 0 at `fit`, to compare arguments" in error
        assert "worker 1 at `predict`, to compare arguments" in error


def test_without_seeds_each_row_is_seen_once():
    chief, other = part("without_seeds")
    assert chief == other
    np.testing.assert_allclose(
        chief["targets"], [(2.0**ROWS - 1) / ROWS] * 3, rtol=1e-6
    )


@pytest.mark.parametrize("name", ["with_seeds", "at the end"])
def test_with_seeds_one_devices_numbers(name):
    keras.utils.set_random_seed(5)
    model = callback_jobs.plain_model()
    model.fit(*callback_jobs.data(), batch_size=4, epochs=2, verbose=0)
    for found in part(name):
        for weight, expected in zip(found, model.get_weights(), strict=True):
            np.testing.assert_allclose(weight, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("rows", "rows of the data: 21 on worker 0, 20 on worker 1"),
        (
            "validation",
            "rows of the validation data: 4 on worker 0, 5 on worker 1",
        ),
        ("callbacks", "save_freq of BackupAndRestore"),
        ("batch_size", "batch_size: 3 on worker 0, 4 on worker 1"),
        ("epochs", "epochs: 3 on worker 0, 4 on worker 1"),
        ("steps_per_epoch", "steps_per_epoch: 3 on worker 0, 4 on worker 1"),
    ],
)
def test_workers_that_disagree_are_told_before_anything_is_trained(what, told):
    for error in part(what):
        assert error.startswith("ReplicaDivergenceError: Workers are about to")
        assert told in error

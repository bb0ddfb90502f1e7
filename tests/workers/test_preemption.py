"""After SIGTERM on one worker, all end after the same call, and go on later."""

import json
import re

import numpy as np
import pytest

from conformance.contract import contract
from keras_dist import errors
from workers import preemption_script
from workers.faults import run_script

pytestmark = pytest.mark.runs_on("torch")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("preemption")
    # Those that lost one are awaited until they have said so.
    options = ["--devices", "1", "--max-restarts", "1", "--grace", "1000"]
    return path, run_script(preemption_script.__file__, path, options=options)


def notes(run, name, life):
    """What both workers noted in a life."""
    folder, done = run
    paths = [folder / f"{name}-{life}-{index}.json" for index in (0, 1)]
    assert all(path.exists() for path in paths), done.stderr[-4000:]
    return [json.loads(path.read_text()) for path in paths]


@contract("F-2", native=False)
def test_all_end_after_the_same_call_and_go_on(run):
    """With a model that only the chief has saved."""
    assert notes(run, "begin", 0) == [0, 0]
    assert notes(run, "begin", 1) == [3, 3]
    for found in notes(run, "model", 1):
        assert found["results"] == [3, 4, 5]
        assert found["calls"] == preemption_script.CALLS


def test_the_weights_are_those_of_a_run_without_an_end(run):
    model = preemption_script.compiled()
    model.fit(
        *preemption_script.data(),
        batch_size=4,
        epochs=preemption_script.CALLS,
        shuffle=False,
        verbose=0,
    )
    for found in notes(run, "model", 1):
        for weight, expected in zip(
            found["weights"], model.get_weights(), strict=True
        ):
            np.testing.assert_allclose(weight, expected, rtol=1e-5, atol=1e-6)


@contract("F-5", native=False)
def test_only_the_chief_writes(run):
    """One file, and none of other workers."""
    chief, other = notes(run, "model", 1)
    assert chief["files"] == ["preemption.weights.h5"]
    assert other["files"] == []
    folder, _ = run
    assert not (folder / "saved-by-1").exists()


@contract("F-3", native=False)
def test_with_a_grace_period_there_is_a_second_checkpoint(run):
    """Training has gone on between the two."""
    folder, _ = run
    saved = (folder / "saved-by-0").read_text().split()
    first, second = map(float, saved)
    assert first == 2.0  # one call, on two replicas
    assert second > first
    for found in notes(run, "counter", 1):
        assert found["status"] == errors.RESTART_EXIT_CODE
        assert found["ended"] == found["restored"] == [second / 2, second]
        assert found["later"] == [second / 2 + 3, second + 6]


@contract("F-4", native=False)
def test_an_error_of_one_worker_reaches_the_others(run):
    _, done = run
    assert done.stderr.count("exit status 42") >= 1  # asks for a restart
    assert re.search(r"WorkerLostError: Worker 0 .*worker 1\b", done.stderr)
    assert done.returncode == 1
    assert "ValueError: worker 1 can't go on" in done.stderr

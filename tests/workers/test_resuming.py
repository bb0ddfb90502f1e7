"""A run that was killed and started again ends like one that was not."""

import json
import pathlib

import numpy as np
import pytest

from workers import resume_script
from workers.faults import run_script

pytestmark = pytest.mark.runs_on("jax")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("resuming")
    options = ["--devices", "1", "--max-restarts", "2"]
    done = run_script(resume_script.__file__, path, options=options)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr.count("SIGKILL (9)") >= 2
    return path


def outcomes(folder, name):
    """What each worker found, and what it finds when nothing happens."""
    for index in (0, 1):
        found, expected = (
            json.loads(pathlib.Path(folder, f"{name}-{index}{end}").read_text())
            for end in (".json", "-unbroken.json")
        )
        yield found, expected


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", resume_script.CASES)
def test_the_same_weights_and_logs_from_there_on(folder, name):
    for found, expected in outcomes(folder, name):
        assert_close(found["weights"], expected["weights"])
        assert_close(found["more"]["loss"], expected["more"]["loss"])
        assert set(found["history"]) == set(expected["history"])
        for key, values in expected["history"].items():
            assert_close(found["history"][key], values[1:])
        assert not found["left"]


@pytest.mark.parametrize(("name", "first"), [("epoch", 0), ("saving", 2)])
def test_callbacks_hear_of_what_is_trained_only(folder, name, first):
    heard = [(1, batch) for batch in range(first, 4)]
    heard += [(2, batch) for batch in range(4)]
    for found, _ in outcomes(folder, name):
        assert [tuple(each) for each in found["batches"]] == heard

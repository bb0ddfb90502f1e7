"""Scripts under `keras-dist run` whose workers would train alone."""

import os
import subprocess
import sys

import pytest

from workers import alone_script


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("made outside of the scope", "StrategyMismatchError: `fit` of model"),
        ("a loop of one worker", "without having joined the other workers"),
    ],
)
def test_it_ends_with_an_error(mistake, told):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "keras_dist.cli", "run"),
            *("--workers", "2", "--devices", "1"),
            *(alone_script.__file__, mistake),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.returncode == 1, done.stderr[-4000:]
    assert told in done.stderr
    assert "MultiWorkerMirroredStrategy" in done.stderr
    assert ("done" in done.stdout) == (mistake == "a loop of one worker")

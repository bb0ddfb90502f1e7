"""Workers that are told to end, as SLURM and Kubernetes do before they kill."""

import os
import signal
import subprocess
import sys

import pytest

from workers import endless_script

# Far more than the test may take: a worker that has to be killed fails it.
GRACE = "10000"
LIMIT = 60


@pytest.fixture
def training():
    """`keras-dist run`, once both workers train."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "keras_dist_cli", "run"),
            *("--workers", "2", "--devices", "1", "--grace", GRACE),
            endless_script.__file__,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    shown = []
    while sum("training" in line for line in shown) < 2:
        shown.append(process.stdout.readline())
        assert shown[-1], "".join(shown)
    yield process
    process.kill()
    process.communicate()


def test_sigterm_ends_workers_that_train(training):
    training.send_signal(signal.SIGTERM)
    training.communicate(timeout=LIMIT)
    assert training.returncode == 128 + signal.SIGTERM

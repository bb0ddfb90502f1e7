"""Workers that are told to end do, and the one that raised is blamed."""

import os
import signal
import subprocess
import sys

import pytest

from workers import endless_script

# Far more than the test may take: a worker that has to be killed fails it.
GRACE = "10000"
LIMIT = 400


@pytest.fixture
def start():
    """A function that starts `keras-dist run`."""
    started = []

    def start_script(*arguments):
        started.append(_run(*arguments))
        return started[-1]

    yield start_script
    for process in started:
        process.kill()
        process.communicate()


def _run(*arguments):
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "keras_dist.cli", "run"),
            *("--workers", "2", "--devices", "1", "--grace", GRACE),
            *(endless_script.__file__, *arguments),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )


def test_sigterm_ends_workers_that_train(start):
    """As SLURM and Kubernetes end them, before they kill."""
    process, shown = start(), []
    while sum("training" in line for line in shown) < 2:
        shown.append(process.stdout.readline())
        assert shown[-1], "".join(shown)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + signal.SIGTERM


def test_the_one_that_raised_is_blamed(start):
    process = start("raise")
    told, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 1, told
    assert "worker 1 failed first" in told
    assert "KeyError: 'its own'" in told.partition("failed first")[2]

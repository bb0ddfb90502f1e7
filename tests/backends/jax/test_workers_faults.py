"""How workers end on JAX: at once, with a reason, and never by an abort."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from keras_dist.errors import RESTART_EXIT_CODE
from keras_dist.launch.addresses import free_addresses

SCRIPT = pathlib.Path(__file__).with_name("worker_script.py")
# Seconds that anything may take, by far.
LIMIT = 300


def until(condition, what, limit=LIMIT):
    """Waits for something that happens in another process."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"Not within {limit} s: {what}."
        time.sleep(0.05)  # nothing of ours can be waited for


def coordinators(address):
    """The processes that coordinate workers at an address."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"keras_dist_jax.cluster.coordinator" in words and (
                address.encode() in words
            ):
                found.append(int(entry.name))
    return found


class Cluster:
    """Workers on this machine; those that are left are killed at the end.

    Args:
        folder: `pathlib.Path` for what they print.
        mode: String, see `worker_script`.
        timeout: Float, seconds of silence that they allow.
        count: Integer, how many they think there are.
    """

    def __init__(self, folder, mode="train", timeout=200, count=2):
        self.folder = folder
        self.mode, self.timeout = mode, timeout
        self.addresses = free_addresses(count)
        self.processes = {}

    def start(self, *indices):
        for index in indices:
            with (self.folder / f"{index}").open("wb") as output:
                self.processes[index] = subprocess.Popen(
                    [sys.executable, SCRIPT, self.mode, str(self.timeout)],
                    env={
                        **os.environ,
                        "KERAS_DIST_WORKERS": ",".join(self.addresses),
                        "KERAS_DIST_WORKER_INDEX": str(index),
                        "KERAS_DIST_VIRTUAL_DEVICES": "1",
                    },
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )

    def printed(self, index):
        return (self.folder / f"{index}").read_text(errors="replace")

    def train(self):
        """Starts all, and waits until they have trained some steps."""
        self.start(*range(len(self.addresses)))
        for index, process in self.processes.items():

            def trains(index=index, process=process):
                assert process.poll() is None, self.printed(index)
                return self.printed(index).count("step\n") > 3

            until(trains, f"steps of worker {index}")

    def status(self, index, limit=LIMIT):
        try:
            return self.processes[index].wait(timeout=limit)
        except subprocess.TimeoutExpired:
            pytest.fail(f"Worker {index} lives on:\n{self.printed(index)}")

    def kill(self, index, number=signal.SIGKILL):
        self.processes[index].send_signal(number)

    def check_nobody_left(self):
        until(
            lambda: not coordinators(self.addresses[0]),
            "the coordinator ends with the last worker",
        )

    def end(self):
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def cluster(tmp_path):
    """A callable that makes a `Cluster`."""
    made = []

    def make(**kwargs):
        made.append(Cluster(tmp_path, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.end()
        each.check_nobody_left()


def test_a_short_stop_harms_nobody(cluster):
    workers = cluster()
    workers.train()
    workers.kill(1, signal.SIGSTOP)
    before = workers.printed(0).count("step\n")
    time.sleep(3)  # as long as it takes to find out who made a meeting fail
    workers.kill(1, signal.SIGCONT)
    until(
        lambda: workers.printed(0).count("step\n") > before + 3,
        "training goes on",
    )


def test_the_coordinator_is_killed(cluster):
    # Silence is not what tells: nothing listens there any more.
    workers = cluster(timeout=60)
    workers.train()
    (coordinator,) = coordinators(workers.addresses[0])
    os.kill(coordinator, signal.SIGKILL)
    for index in range(2):
        assert workers.status(index) == RESTART_EXIT_CODE
        assert "without the others: the coordinator at" in workers.printed(
            index
        )


def test_workers_end_when_they_are_done(cluster):
    workers = cluster(mode="end")
    workers.start(0, 1)
    assert workers.status(0) == 0
    assert workers.status(1) == 0

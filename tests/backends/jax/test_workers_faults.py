"""Workers end on JAX at once, with a reason, and never by an abort."""

import contextlib
import os
import pathlib
import signal
import time

import worker_jobs

import keras_dist
from keras_dist.errors import RESTART_EXIT_CODE
from keras_dist.launch.addresses import free_addresses
from workers.faults import LIMIT
from workers.test_faults import start  # noqa: F401


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


def trained(start):  # noqa: F811
    """Two workers that have trained some steps, and their coordinator."""
    addresses = free_addresses(2)
    workers = start("nowhere", "nowhere", addresses=addresses)
    for worker in workers * 4:
        worker.wait_for("step")
    (coordinator,) = coordinators(addresses[0])
    return workers, coordinator


def test_a_short_stop_harms_nobody(start):  # noqa: F811
    (first, second), _ = trained(start)
    second.process.send_signal(signal.SIGSTOP)
    time.sleep(3)  # as long as it takes to find out who made a meeting fail
    before = len(first.printed)
    second.process.send_signal(signal.SIGCONT)
    while len(first.printed) <= before + 3:
        first.wait_for("step")


def test_the_coordinator_is_killed(start):  # noqa: F811
    # Silence is not what tells: nothing listens there any more.
    workers, coordinator = trained(start)
    os.kill(coordinator, signal.SIGKILL)
    for worker in workers:
        assert worker.end()[0] == RESTART_EXIT_CODE
        assert "without the others: the coordinator at" in worker.text()


def test_workers_and_their_coordinator_end_when_they_are_done():
    addresses = keras_dist.launch(worker_jobs.ends, workers=2, devices=1)
    assert addresses[0] == addresses[1]
    deadline = time.monotonic() + LIMIT
    while coordinators(addresses[0]):
        assert time.monotonic() < deadline
        time.sleep(0.05)  # nothing of ours can be waited for

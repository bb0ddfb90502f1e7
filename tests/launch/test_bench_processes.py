"""Loops of several processes, for a bench: started, run, ended."""

import contextlib
import threading

import pytest

from keras_dist.bench.loops import Loop
from keras_dist.bench.processes import Processes
from keras_dist.bench.processes import ProcessesError


def test_workers_run_loops_when_told_to(capfd):
    @contextlib.contextmanager
    def make():
        import os

        index = int(os.environ["KERAS_DIST_WORKER_INDEX"])

        class Times(Loop):
            def run(self, steps):
                return 10.0 * index + steps

        yield {"times": Times()}
        print("done")

    before = set(threading.enumerate())
    processes = Processes(make, 2)
    loop = processes.loop("times")
    assert loop.run(3) == 8.0
    assert loop.run(4) == 9.0
    loop.close()
    loop.close()
    assert set(threading.enumerate()) == before
    assert "[worker 1] done" in capfd.readouterr().out


def test_a_worker_that_fails_is_an_error():
    def make():
        raise OSError("no such thing")

    before = set(threading.enumerate())
    with pytest.raises(
        ProcessesError, match="1 worker processes has failed: no such thing"
    ):
        Processes(make, 1).loop("any")
    assert set(threading.enumerate()) == before

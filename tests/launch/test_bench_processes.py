"""Loops of several processes, for a bench: started, run, ended."""

import contextlib
import threading

import pytest

from keras_dist.bench.loops import Loop
from keras_dist.bench.processes import Processes
from keras_dist.bench.processes import ProcessesError

pytestmark = pytest.mark.runs_on("torch")


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


class Gone:
    """Stands for the connection to a worker that has ended."""

    def __init__(self):
        self.closed = 0

    def send(self, what):
        raise BrokenPipeError(32, "Broken pipe")

    def recv(self):
        raise ConnectionResetError(104, "Connection reset by peer")

    def close(self):
        self.closed += 1


@pytest.mark.parametrize("sends", [False, True], ids=["send", "answer"])
def test_a_worker_that_ended_between_two_runs_is_an_error(monkeypatch, sends):
    if sends:
        monkeypatch.setattr(Gone, "send", lambda self, what: None)
    processes, gone = Processes(None, 2), [Gone(), Gone()]
    processes._connections = list(gone)
    with pytest.raises(
        ProcessesError, match="One of 2 worker processes has failed"
    ):
        processes.run("any", 1)
    processes.close()
    assert [each.closed for each in gone] == [1, 1]


def test_a_worker_that_fails_in_a_loop_is_an_error():
    @contextlib.contextmanager
    def make():
        class Fails(Loop):
            def run(self, steps):
                raise OSError("no such step")

        yield {"fails": Fails()}

    before = set(threading.enumerate())
    loop = Processes(make, 1).loop("fails")
    with pytest.raises(ProcessesError, match="no such step"):
        loop.run(1)
    loop.close()
    assert set(threading.enumerate()) == before

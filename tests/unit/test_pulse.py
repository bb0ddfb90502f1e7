"""A process beside a worker tells whether the worker runs, and ends with it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from keras_dist.joining import pulse
from keras_dist.joining.addresses import listen
from keras_dist.joining.addresses import split
from keras_dist.joining.pulse import Pulse
from keras_dist.joining.pulse import has_pulse

LIMIT = 100
# It holds Python's lock, and has a child that keeps its files open.
WORKER = f"""
import ctypes, os, sys, time
sys.path[:0] = {sys.path!r}
from keras_dist.joining.addresses import listen
from keras_dist.joining.pulse import Pulse
print(Pulse(listen("127.0.0.1:0")).address, flush=True)
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep({LIMIT})
    os._exit(0)
ctypes.PyDLL(None).sleep({LIMIT})
"""


def until(condition):
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)  # another process is awaited


def is_there(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.skipif(
    sys.platform != "linux", reason="Linux tells who was stopped."
)
def test_a_process_runs_or_is_stopped_or_killed(monkeypatch):
    monkeypatch.setattr(pulse, "_PATIENCE", float(LIMIT))
    with subprocess.Popen(
        [sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True
    ) as worker:
        address = split(worker.stdout.readline().strip())
        child = int(worker.stdout.readline())
        try:
            assert has_pulse(*address)
            worker.send_signal(signal.SIGSTOP)
            until(lambda: not has_pulse(*address))
            worker.send_signal(signal.SIGCONT)
            until(lambda: has_pulse(*address))
            worker.kill()
            until(lambda: not has_pulse(*address))
        finally:
            worker.kill()
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("is_forked", [False, True])
def test_closing_leaves_no_process(is_forked):
    own = Pulse(listen("127.0.0.1:0"))
    process, address = own._process, split(own.address)
    assert has_pulse(*address)
    # A forked child keeps it open.
    kept = os.dup(process.stdin.fileno()) if is_forked else None
    try:
        own.close()
    finally:
        if is_forked:
            os.close(kept)
    assert not has_pulse(*address)
    assert not is_there(process.pid)

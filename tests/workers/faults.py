"""Workers' processes that come to harm, and what the others say then."""

import os
import pathlib
import queue
import re
import subprocess
import sys
import threading
import time

TESTS = pathlib.Path(__file__).parent.parent
JOB = pathlib.Path(__file__).with_name("fault_jobs.py")
# Seconds that everything may take, by far.
LIMIT = 300
ONE_CPU = {"KERAS_DIST_VIRTUAL_DEVICES": "1"}


class Worker:
    """One worker's process, and what it printed.

    Args:
        index: Integer.
        addresses: List of strings, every worker's.
        place: String, where it stops; see `fault_jobs`.
        timeout: Float, the `timeout_seconds` of its strategy.
        variables: Dict of environment variables that give it devices.
    """

    def __init__(
        self, index, addresses, place="nowhere", timeout=60, variables=ONE_CPU
    ):
        self.name = f"worker {index}"
        self.process = subprocess.Popen(
            [sys.executable, JOB, place, str(timeout)],
            env={
                **os.environ,
                "KERAS_DIST_WORKERS": ",".join(addresses),
                "KERAS_DIST_WORKER_INDEX": str(index),
                **variables,
                "PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ['PYTHONPATH']}",
                "PYTHONUNBUFFERED": "1",
                "OMP_NUM_THREADS": "1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines = queue.SimpleQueue()
        self.printed = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.printed.append(line)
            self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, line):
        """Waits until it has printed a line."""
        deadline = time.monotonic() + LIMIT
        while (
            found := self._lines.get(timeout=deadline - time.monotonic())
        ) is not None:
            if found.strip() == line:
                return
        raise AssertionError(f"{self.name} ended:\n{''.join(self.printed)}")

    def end(self):
        """Waits for its end; its exit status, and the seconds that took."""
        start = time.monotonic()
        status = self.process.wait(timeout=LIMIT)
        return status, time.monotonic() - start

    def text(self):
        self._reader.join(timeout=10)
        return "".join(self.printed)

    def close(self):
        self.process.kill()
        self.process.wait()
        self._reader.join(timeout=10)
        self.process.stdout.close()
        self.process.stdin.close()


def go(*workers):
    """Lets workers begin once all of them have imported what they need."""
    for worker in workers:
        worker.wait_for("imported")
    for worker in workers:
        worker.process.stdin.write("\n")
        worker.process.stdin.flush()


def goes_on(*workers):
    """Waits until each of them has trained another step."""
    for worker in workers:
        before = len(worker.printed)
        while len(worker.printed) <= before:
            worker.wait_for("step")


def run_script(script, *arguments, options=("--devices", "1"), timeout=500):
    """What `keras-dist run` of two workers ends with."""
    words = ["-m", "keras_dist.cli", "run", "--workers", "2", *options]
    return subprocess.run(
        [sys.executable, *words, script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )


def assert_names(worker, lost):
    """Its last words are a `WorkerLostError` that names the lost one."""
    text = worker.text()
    assert re.search(rf"WorkerLostError: .*worker {lost}\b", text), text[-4000:]
    assert "Aborted" not in text.splitlines()[-1]

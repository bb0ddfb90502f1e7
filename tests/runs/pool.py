"""Runs side by side, and what is told of each."""

import concurrent.futures
import dataclasses
import re
import subprocess
import sys
import tempfile
import threading
import time

from runs.runs import TESTS

# Such as `2 failed, 3 passed in 0.10s`, maybe between signs.
COUNTS = re.compile(r"^(=+ )?\d+ (passed|failed|error|skipped|desel).* in ")


@dataclasses.dataclass(frozen=True)
class End:
    """How a run ended.

    Args:
        run: The `Run`.
        status: Integer, its exit status.
        seconds: Float, how long it took.
        summary: String, how it ended; see `summary_of`.
    """

    run: object
    status: int
    seconds: float
    summary: str


def run_all(runs, size):
    """Starts runs in order, and shows how each one ended.

    Args:
        runs: List of `Run`.
        size: Integer, how many there are at once.

    Returns:
        List, the `End` of each run. On an exception, those that still run are
        ended first.
    """
    processes = _Processes()
    threads = concurrent.futures.ThreadPoolExecutor(size)
    with tempfile.TemporaryDirectory() as folder:
        ends = [threads.submit(_end, run, folder, processes) for run in runs]
        try:
            return [end.result() for end in ends]
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            processes.end()
            threads.shutdown()


class _Processes:
    """Those that run, which are ended together."""

    def __init__(self):
        self._alive = set()
        self._is_ended = False
        self._lock = threading.Lock()

    def start(self, command, **settings):
        """Returns a process, unless all have been ended."""
        with self._lock:
            if self._is_ended:
                raise concurrent.futures.CancelledError
            process = subprocess.Popen(command, **settings)
            self._alive.add(process)
            return process

    def wait(self, process):
        """Returns its exit status."""
        status = process.wait()
        with self._lock:
            self._alive.discard(process)
        return status

    def end(self):
        """Ends those that run, and lets no more begin."""
        with self._lock:
            self._is_ended = True
            for process in self._alive:
                process.terminate()


def _end(run, folder, processes):
    start = time.monotonic()
    try:
        environment = run.environment(folder)
    except subprocess.CalledProcessError as error:
        # Other runs go on.
        _say(f"== {run.name}: {error}")
        return End(run, 1, time.monotonic() - start, str(error))
    _say(f"== {run.name}: starts")
    with tempfile.TemporaryFile("w+", dir=folder, errors="replace") as output:
        process = processes.start(
            [sys.executable, *run.command],
            cwd=TESTS.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        status = processes.wait(process)
        output.seek(0)
        text = output.read().strip()
    seconds = time.monotonic() - start
    summary = summary_of(text)
    _say(f"== {run.name}: status {status} after {seconds:.0f} s")
    _say(text if status else summary)
    return End(run, status, seconds, summary)


def summary_of(text):
    """The line of pytest's counts, after which libraries may say more.

    Of other programs it is the last line.
    """
    lines = text.splitlines() or [""]
    counts = [line for line in lines if COUNTS.search(line)]
    return (counts or lines)[-1]


def _say(text):
    print(text, flush=True)

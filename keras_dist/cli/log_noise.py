"""Leaves out what compilers log on standard error, and nothing else."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import TextIO

# Information, the line that says where it goes, and what the compiler for GPUs
# says of a program that does not fit: `plan` says it too.
_NOISE = re.compile(
    rb"I\d{4} |WARNING: All log messages before absl::|"
    rb"[EW]\d{4} .*gpu_hlo_schedule\.cc"
)


@contextlib.contextmanager
def without_log_noise() -> Iterator[TextIO]:
    """Lets another process pass on standard error, but for log information.

    Yields standard error as it was, for a bar that needs a terminal.
    """
    # A process of its own, because this one may be aborted.
    kept = os.dup(2)
    reading, writing = os.pipe()
    command = [sys.executable, "-I", "-S", __file__]
    passing = subprocess.Popen(command, stdin=reading)
    os.close(reading)
    sys.stderr.flush()
    os.dup2(writing, 2)
    os.close(writing)
    try:
        with open(kept, "w", closefd=False) as stderr:
            yield stderr
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        passing.wait()


def _pass_on() -> None:
    """Writes the lines of standard input to standard error, but for noise."""
    # Ctrl-C is for the process whose lines they are.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in iter(sys.stdin.buffer.readline, b""):
        if not _NOISE.match(line):
            os.write(2, line)


if __name__ == "__main__":
    _pass_on()

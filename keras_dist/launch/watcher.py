"""Ends the workers of a launcher that was killed.

The kernel ends a worker with its launcher (`guard.py`), but not the processes
that the worker has started. The watcher, a process of its own, does: it waits
at a pipe that closes when the launcher is gone for any reason, and then kills
all process groups that the launcher had named to it.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator


class Watcher:
    """The launcher's end of the pipe to the watcher's process."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def add(self, group: int) -> None:
        """Names a process group that is to end with the launcher."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Names a process group that has ended by itself."""
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        # If the watcher was killed, the guards are left.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())


@contextlib.contextmanager
def watching() -> Iterator[Watcher]:
    """Runs a watcher as long as the context lasts."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        # Signals to the launcher's process group don't reach it.
        start_new_session=True,
    )
    with process:
        yield Watcher(process)


def main() -> None:
    """Waits for the launcher's end, and then kills the groups it has named."""
    # Only the end of the launcher ends the watcher.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()

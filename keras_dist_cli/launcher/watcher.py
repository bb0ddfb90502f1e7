"""Ends the workers of a launcher that was killed.

The kernel ends a worker with its launcher (`guard.py`), but not what the
worker has started. A process of its own does: it waits at a pipe that closes
when the launcher is gone, however that came, and then kills all process groups
that the launcher had named to it.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator


class Watcher:
    """The launcher's end of the pipe."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def add(self, group: int) -> None:
        """Names a process group that ends with the launcher."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Names a process group that has ended."""
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        # It may have been killed; the guards are left then.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())


@contextlib.contextmanager
def watching() -> Iterator[Watcher]:
    """A watcher, as long as the context lasts."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        # Out of reach of what ends the launcher's group.
        start_new_session=True,
    )
    with process:
        yield Watcher(process)


def main() -> None:
    """Waits for the launcher's end."""
    # Only the end of the launcher ends this.
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

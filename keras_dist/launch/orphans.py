"""Ends the workers of a launcher that was killed, and what they started.

This file is run by path, without site packages, so that it takes no time:

- `orphans.py PARENT PROGRAM [ARGUMENTS]...`, the guard, becomes the program,
  which the kernel ends with its parent. A `preexec_fn` would do the same
  between fork and exec, where Python code can deadlock.
- `orphans.py`, the watcher, ends the processes that a worker has started. It
  waits at a pipe that closes when the launcher is gone for any reason, and then
  kills all process groups that the launcher had named to it.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

PROGRAM = (sys.executable, "-I", "-S", __file__)
PR_SET_PDEATHSIG = 1


class Watcher:
    """The launcher's end of the pipe to the watcher's process."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def add(self, group: int) -> None:
        """Names a process group that is to end with the launcher."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Names a process group that has ended by itself."""
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        # If the watcher was killed, the guards are left.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, line.encode())


@contextlib.contextmanager
def watching() -> Iterator[Watcher]:
    """Runs a watcher as long as the context lasts."""
    import subprocess  # not needed by the guard

    process = subprocess.Popen(
        PROGRAM,
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        # Signals to the launcher's process group don't reach it.
        start_new_session=True,
    )
    assert process.stdin is not None
    with process:
        yield Watcher(process.stdin.fileno())


def watch() -> None:
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


def guard(parent: str, *command: str) -> None:
    """Asks the kernel for SIGKILL at the parent's death, then calls exec."""
    if sys.platform == "linux":
        import ctypes  # not needed by the watcher

        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    # The parent may have died before the kernel was asked.
    if os.getppid() != int(parent):
        sys.exit(1)
    # Python ignores SIGPIPE, and exec keeps ignored signals ignored.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execv(command[0], command)


if __name__ == "__main__":
    if sys.argv[1:]:
        guard(*sys.argv[1:])
    else:
        watch()

"""The pulse of a process: whether it runs, as a small process beside it says.

A process can't say so itself while native code holds Python's lock. This file
is run by path, without site packages, so that it takes no time. The program
ends with the process.
"""

import contextlib
import os
import select
import socket
import subprocess
import sys

# Seconds in which a process that runs has answered.
_PATIENCE = 5.0
_RUNS = b"+"
# Letters of states in Linux' tables: stopped, traced, and dead.
_STANDS_STILL = "TtXZ"


class Pulse:
    """The process that answers for this one, at the address of a listener."""

    def __init__(self, listener: socket.socket) -> None:
        with listener:
            host, port, *_ = listener.getsockname()
            self.address = f"[{host}]:{port}"
            number = listener.fileno()
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", __file__),
                    *(str(os.getpid()), str(number)),
                ],
                # It closes when this process ends, however that happens.
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                pass_fds=[number],
                # A terminal's signals to this process don't reach it.
                start_new_session=True,
            )

    def close(self) -> None:
        """Ends the process that answers."""
        # Children of this process may keep the input open.
        self._process.kill()
        with self._process:
            pass


def has_pulse(host: str, port: int) -> bool:
    """Tells whether the process behind a pulse runs; false without answer."""
    try:
        with socket.create_connection((host, port), _PATIENCE) as connection:
            return connection.recv(1) == _RUNS
    except OSError:
        return False


def answer_for(process: int, descriptor: int) -> None:
    """Answers who connects, as long as the parent process is there."""
    with socket.socket(fileno=descriptor) as listener:
        # Children of the process may keep the input open after its end.
        while os.getppid() == process:
            ready, _, _ = select.select([listener, sys.stdin], [], [], 1.0)
            if sys.stdin in ready:
                return
            if listener in ready:
                with listener.accept()[0] as connection:
                    if _runs(process):
                        with contextlib.suppress(OSError):
                            connection.sendall(_RUNS)


def _runs(process: int) -> bool:
    if sys.platform != "linux":
        return True  # it is there, as the caller has checked
    try:
        with open(f"/proc/{process}/stat") as file:
            # The name of the program, in brackets, may have any characters.
            state = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in _STANDS_STILL


if __name__ == "__main__":
    answer_for(*map(int, sys.argv[1:]))

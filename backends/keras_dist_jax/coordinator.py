"""The coordinator's process, through which the workers of a cluster connect.

It calls the roll before JAX's service takes over the address, because that
service aborts workers that wait for a worker that never comes.
"""

import contextlib
import pathlib
import select
import signal
import socket
import sys
import threading
import time
from typing import Any

from keras_dist_jax.addresses import listen
from keras_dist_jax.addresses import split

# In seconds: the time without a connection after which no worker is left; the
# longest wait for that after the parent process has ended; the longest wait for
# it after SIGTERM.
_QUIET, _LINGER, _GRACE = 0.5, 60.0, 8.0


def serve(address: str, num_workers: int) -> None:
    """Coordinates one run of a cluster, until SIGTERM and its workers' end."""
    with contextlib.closing(listen(address)) as listener:
        call_roll(listener, num_workers)
    service = start_service(address, num_workers)
    is_told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: is_told.set())
    is_told.wait()
    _linger(split(address)[1], _GRACE)
    del service


def _linger(port: int, limit: float) -> None:
    """Waits until a port has no connections, at most `limit` seconds."""
    now = quiet_since = time.monotonic()
    end = now + limit
    while now < end and now - quiet_since < _QUIET:
        # Polled: the end of a connection does not tell whether it was the last.
        time.sleep(0.1)
        now = time.monotonic()
        if has_connections(port):
            quiet_since = now


def call_roll(
    listener: socket.socket, num_workers: int, parent: Any = None
) -> None:
    """Waits until each worker has said that it is there.

    A worker sends a line with its position and the number of workers. Whenever
    the set of present workers changes, it gets a line with their positions;
    once all are there, it gets `go` and closes the connection. If the file
    `parent` ends, no process needs the roll any more, which raises `EOFError`.
    """
    present: dict[int, socket.socket] = {}
    unnamed: list[socket.socket] = []
    while len(present) < num_workers:
        watched = [listener, *unnamed, *present.values()]
        ready, _, _ = select.select(
            [*watched, parent] if parent is not None else watched, [], []
        )
        if parent in ready:
            raise EOFError(
                "The process that started this coordinator has ended."
            )
        for index, connection in list(present.items()):
            # Workers send nothing after the first line: readable means closed.
            if connection in ready:
                connection.close()
                del present[index]
        for connection in [c for c in unnamed if c in ready]:
            unnamed.remove(connection)
            named = _named(connection, num_workers)
            if named is None or named in present:
                _tell(connection, "refused")
                connection.close()
            else:
                present[named] = connection
        if listener in ready:
            unnamed.append(listener.accept()[0])
        here = " ".join(map(str, sorted(present)))
        for connection in present.values():
            _tell(connection, here)
    for connection in present.values():
        _tell(connection, "go")
    for connection in present.values():
        # The side that closes first keeps the address in use for a while.
        # That must be the worker, as JAX's service takes this one's.
        connection.settimeout(5)
        with contextlib.suppress(OSError):
            while connection.recv(1024):
                pass
        connection.close()


def _named(connection: socket.socket, num_workers: int) -> int | None:
    """Reads two numbers from a new connection; `None` if they are invalid."""
    connection.settimeout(1)
    try:
        words = connection.recv(64).split()
        index, count = (int(word) for word in words)
    except (OSError, ValueError):
        return None
    return index if 0 <= index < count == num_workers else None


def _tell(connection: socket.socket, line: str) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(f"{line}\n".encode())


def start_service(address: str, num_workers: int) -> Any:
    """Starts JAX's service, which ends when the result is deleted."""
    from keras_dist_jax.runtime_internals import new_service

    return new_service(address, num_workers)


def has_connections(port: int) -> bool:
    """Tells whether a port of this machine has an established connection."""
    for name in ("tcp", "tcp6"):
        table = pathlib.Path("/proc/self/net") / name
        with contextlib.suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                own = int(local.rsplit(":", 1)[1], 16)
                if own == port and state == "01":
                    return True
    return False


def _serve_for_parent(address: str, num_workers: int, listener: int) -> None:
    """Serves until the parent process and all workers have ended."""
    parent = sys.stdin.buffer
    with socket.socket(fileno=listener) as roll:
        try:
            call_roll(roll, num_workers, parent)
        except EOFError:
            return
    service = start_service(address, num_workers)
    parent.read()
    _linger(split(address)[1], _LINGER)
    del service


if __name__ == "__main__":
    _serve_for_parent(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

"""The coordinator: where the workers of a cluster meet, as its own process.

It calls the roll first, over plain sockets: JAX's service aborts workers that
wait for one that never comes. Once all are there, JAX's service takes over
the address. Neither Keras nor an accelerator is needed here.
"""

import contextlib
import pathlib
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from keras_dist_jax.addresses import listen
from keras_dist_jax.addresses import split

# Seconds without a connection after which nobody is left; seconds for which it
# waits at most once whoever started it has ended, and once it is told to end.
_QUIET, _LINGER, _GRACE = 0.5, 60.0, 8.0


def serve(address: str, num_workers: int) -> None:
    """Coordinates one run of a cluster, until the process is terminated.

    Told to end by SIGTERM, it stays for those who are still connected, for a
    while: workers of other hosts may end later.

    Args:
        address: String, `"host:port"`. Nothing listens on other addresses.
        num_workers: Integer, how many workers there are.

    Raises:
        AddressError: If the address is unknown or taken.
    """
    with contextlib.closing(listen(address)) as listener:
        call_roll(listener, num_workers)
    service = start_service(address, num_workers)
    is_told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: is_told.set())
    is_told.wait()
    _linger(split(address)[1], _GRACE)
    del service


def _linger(port: int, limit: float) -> None:
    """Waits until nobody is connected to a port any more.

    Args:
        port: Integer.
        limit: Float, seconds to wait at most.
    """
    now = quiet_since = time.monotonic()
    end = now + limit
    while now < end and now - quiet_since < _QUIET:
        time.sleep(0.1)  # no connection tells that it is the last
        now = time.monotonic()
        if has_connections(port):
            quiet_since = now


def call_roll(
    listener: socket.socket, num_workers: int, parent: Any = None
) -> None:
    """Waits until each worker has said that it is there.

    A worker sends a line with its position and the number of workers. It
    gets a line with the positions of those who are there whenever that
    changes, then `go`, and closes the connection.

    Args:
        listener: A listening socket.
        num_workers: Integer, how many workers there are.
        parent: File object whose end means that nobody needs this any more.

    Raises:
        EOFError: If `parent` has ended.
    """
    present: dict[int, socket.socket] = {}
    unnamed: list[socket.socket] = []
    while len(present) < num_workers:
        watched = [listener, *unnamed, *present.values()]
        ready, _, _ = select.select(
            [*watched, parent] if parent is not None else watched, [], []
        )
        if parent in ready:
            raise EOFError("Whoever started this coordinator has ended.")
        for index, connection in list(present.items()):
            if connection in ready:  # they have nothing to say: it has ended
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
        # Who closes first keeps the address for a while; that is them.
        connection.settimeout(5)
        with contextlib.suppress(OSError):
            while connection.recv(1024):
                pass
        connection.close()


def _named(connection: socket.socket, num_workers: int) -> int | None:
    """The position that a new connection tells, if it is one of this cluster.

    Whoever connects may be anybody: nothing but two numbers is read.
    """
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
    """Starts JAX's service on an address; it ends with what is returned."""
    from keras_dist_jax.runtime_internals import new_service

    return new_service(address, num_workers)


def has_connections(port: int) -> bool:
    """Whether anybody is connected to a port of this machine."""
    return any(state == "01" for state in _states(port))


def _states(port: int) -> Iterator[str]:
    for name in ("tcp", "tcp6"):
        table = pathlib.Path("/proc/self/net") / name
        with contextlib.suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                if int(local.rsplit(":", 1)[1], 16) == port:
                    yield state


def _serve_for_parent(address: str, num_workers: int, listener: int) -> None:
    """Serves until whoever started this has ended, and all workers too."""
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

"""The coordinator's process, through which the workers of a cluster connect.

It calls the roll before JAX's service takes over the address, because that
service aborts workers that wait for a worker that never comes.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

from keras_dist.plugins import CONNECTED
from keras_dist.plugins import Facts
from keras_dist.plugins import call_roll
from keras_dist.plugins import listen
from keras_dist.plugins import sockets_of
from keras_dist.plugins import split

# In seconds: the time without a connection after which no worker is left; the
# longest wait for that after the parent process has ended; the longest wait for
# it after SIGTERM.
_QUIET, _LINGER, _GRACE = 0.5, 60.0, 8.0


def serve(address: str, num_workers: int) -> None:
    """Coordinates one run of a cluster, until SIGTERM and its workers' end."""
    facts = Facts(os.environ["KERAS_DIST_JOB"], num_workers, "jax")
    with contextlib.closing(listen(address)) as listener:
        call_roll(listener, facts)
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


def start_service(address: str, num_workers: int) -> Any:
    """Starts JAX's service, which ends when the result is deleted."""
    from keras_dist_jax.runtime_internals import new_service

    return new_service(address, num_workers)


def has_connections(port: int) -> bool:
    """Tells whether a port of this machine has an established connection."""
    return any(sockets_of(port, CONNECTED))


def _serve_for_parent(address: str, facts: Facts, listener: int) -> None:
    """Serves until the parent process and all workers have ended."""
    parent = sys.stdin.buffer
    with socket.socket(fileno=listener) as roll:
        try:
            call_roll(roll, facts, parent)
        except EOFError:
            return
    service = start_service(address, facts.workers)
    parent.read()
    _linger(split(address)[1], _LINGER)
    del service


if __name__ == "__main__":
    given = Facts(**json.loads(sys.argv[2]))
    _serve_for_parent(sys.argv[1], given, int(sys.argv[3]))

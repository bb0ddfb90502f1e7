"""The store of a cluster's workers, through which they find each other."""

import contextlib
import datetime
import errno
import socket
import time
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from keras_dist.core.addresses import split_address
from keras_dist.core.plan import Cluster
from keras_dist.errors import ClusterError
from keras_dist.errors import WorkerLostError
from keras_dist.plugin.heartbeats import Blackboard


class StoreBoard(Blackboard):
    """A `torch.distributed` store as a blackboard."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def write(self, key: str, text: str) -> None:
        with _connected():
            self._store.set(key, text)

    def read(self, keys: Sequence[str]) -> list[str]:
        with _connected():
            return [
                self._store.get(key).decode()
                if self._store.check([key])
                else ""
                for key in keys
            ]


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # the base of all errors of a store
        raise ConnectionError(
            f"worker 0, which serves all others, can't be reached ({error})"
        ) from error


def rendezvous(
    cluster: Cluster, timeout: float, own: str
) -> tuple[Any, list[str]]:
    """Opens the store; returns it and each worker's word, once written."""
    host, port = split_address(cluster.leader)
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        raise ClusterError(
            f"The chief's host is unknown. Received: '{cluster.leader}' "
            f"({error}). Expected: a name or address that every worker can "
            "resolve."
        ) from error
    deadline = time.monotonic() + timeout
    store = _served(cluster) if cluster.is_chief else connect(cluster, timeout)
    keys = [f"keras_dist/joined/{i}" for i in range(cluster.num_workers)]
    store.set(keys[cluster.index], own)
    try:
        left = max(deadline - time.monotonic(), 0.1)
        store.wait(keys, datetime.timedelta(seconds=left))
    except RuntimeError as error:
        missing = [i for i, key in enumerate(keys) if not store.check([key])]
        raise WorkerLostError(
            f"Not all workers joined within {timeout:g} seconds. Missing: "
            f"{', '.join(f'worker {i}' for i in missing)}. Expected: "
            f"{cluster.num_workers} workers, each started with its own index. "
            "See what they printed."
        ) from error
    return store, [store.get(key).decode() for key in keys]


def _served(cluster: Cluster) -> Any:
    host, port = split_address(cluster.leader)
    # Bound here, because a socket that the store opens listens on every
    # interface.
    family, _, _, _, where = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    )[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(where)
    except OSError as error:
        is_used = error.errno == errno.EADDRINUSE
        what = "is in use" if is_used else "is not an address of this host"
        raise ClusterError(
            f"The chief can't listen: its address {what}. Received: "
            f"'{cluster.leader}' ({error}). Expected: an address of this host "
            "with a free port."
        ) from error
    listener.listen()
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def connect(cluster: Cluster, timeout: float) -> Any:
    """Connects to the store of the cluster's leader, which may start later."""
    host, port = split_address(cluster.leader)
    try:
        return dist.TCPStore(
            host,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=timeout),
        )
    except RuntimeError as error:
        raise WorkerLostError(
            f"The chief can't be reached: worker 0 at '{cluster.leader}' did "
            f"not answer within {timeout:g} seconds. Expected: a worker 0, "
            "started with the same addresses. See what it printed."
        ) from error

"""The store of a cluster's workers, through which they find each other."""

import contextlib
import datetime
import socket
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from keras_dist.errors import WorkerLostError
from keras_dist.plugins import Blackboard
from keras_dist.plugins import Cluster
from keras_dist.plugins import answer_roll
from keras_dist.plugins import open_listener
from keras_dist.plugins import resolve


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


def open_store(
    cluster: Cluster, timeout: float, word: str
) -> tuple[Any, list[str]]:
    """Opens the store; returns it and each worker's word, once written."""
    with contextlib.ExitStack() as stack:
        listener = None
        if cluster.is_chief:
            # Opened here, because a socket that the store opens listens on
            # every interface.
            listener = stack.enter_context(open_listener(cluster))
        answer_roll(cluster, timeout, listener)
        store = connect(cluster, timeout, listener)
    keys = [f"keras_dist/joined/{i}" for i in range(cluster.num_workers)]
    store.set(keys[cluster.index], word)
    try:
        store.wait(keys, datetime.timedelta(seconds=timeout))
    except RuntimeError as error:
        missing = [i for i, key in enumerate(keys) if not store.check([key])]
        raise WorkerLostError(
            "Not all workers connected with the store within "
            f"{timeout:g} seconds. Missing: "
            f"{', '.join(f'worker {i}' for i in missing)}. See what they "
            "printed, and start all workers again."
        ) from error
    return store, [store.get(key).decode() for key in keys]


def connect(
    cluster: Cluster, timeout: float, listener: socket.socket | None = None
) -> Any:
    """Connects to the store of the cluster's leader, or serves it there."""
    host, port = resolve(cluster.leader)
    served = {} if listener is None else {"master_listen_fd": listener.detach()}
    try:
        return dist.TCPStore(
            host,
            port,
            is_master=listener is not None,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=timeout),
            **served,
        )
    except RuntimeError as error:
        raise WorkerLostError(
            f"The chief can't be reached: worker 0 at '{cluster.leader}' did "
            f"not answer within {timeout:g} seconds. See what it printed, and "
            "start all workers again."
        ) from error

"""A worker's answer to the roll call, and its wait for the others."""

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import socket
import time
from typing import Any

import keras

from keras_dist.core.plan import Cluster
from keras_dist.errors import ClusterError
from keras_dist.errors import WorkerLostError
from keras_dist.joining.addresses import listen
from keras_dist.joining.addresses import resolve
from keras_dist.joining.roll_call import LONGEST
from keras_dist.joining.roll_call import Facts
from keras_dist.joining.roll_call import calling_roll

# Seconds in which one that calls a roll has refused a worker.
_ASKING = 5.0


def facts_of(cluster: Cluster) -> Facts:
    """Returns what all workers of a cluster say alike."""
    return Facts(
        job=cluster.job or _word_of(cluster.addresses),
        workers=cluster.num_workers,
        backend=keras.backend.backend(),
    )


def _word_of(addresses: tuple[str, ...]) -> str:
    """Returns the word of a job whose launcher has none."""
    number = hashlib.sha256(",".join(addresses).encode()).hexdigest()[:8]
    return f"{len(addresses)} workers, the first at {addresses[0]} ({number})"


def open_listener(cluster: Cluster, everywhere: bool = False) -> socket.socket:
    """Opens the socket of this worker's own address; see `listen`.

    Raises:
        ClusterError: If this worker can't listen there. If another process
            calls a roll at the chief's address, that one says why.
    """
    try:
        return listen(cluster.addresses[cluster.index], everywhere=everywhere)
    except ClusterError:
        if cluster.is_chief and cluster.coordinator is None:
            _Answer(cluster).ask()
        raise


def answer_roll(
    cluster: Cluster, timeout: float, listener: socket.socket | None = None
) -> None:
    """Says that this worker is there, and waits until all of them are.

    Args:
        cluster: `Cluster` to which this worker belongs.
        timeout: Float, seconds in which all workers have to come.
        listener: The chief's socket, where workers meet unless there is a
            coordinator. It stays open.

    Raises:
        ClusterError: If this worker is refused, or another one that does not
            fit.
        WorkerLostError: If not all came in time, or the one that calls the
            roll ended.
    """
    with contextlib.ExitStack() as stack:
        if listener is not None and cluster.coordinator is None:
            stack.enter_context(calling_roll(listener, facts_of(cluster)))
        _Answer(cluster).wait(timeout)


class _Answer:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._where = cluster.coordinator or cluster.leader
        said = {
            "index": cluster.index,
            "token": secrets.token_hex(8),
            "process": f"process {os.getpid()} on {socket.gethostname()}",
            **dataclasses.asdict(facts_of(cluster)),
        }
        self._line = json.dumps(said).encode() + b"\n"
        self._present: set[int] = set()
        self._turned_away: list[str] = []
        self._has_met = False

    def wait(self, timeout: float) -> None:
        """Answers until all workers have come."""
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            try:
                if self._is_complete(deadline):
                    return
            except TimeoutError:
                continue
            except OSError:  # nothing listens there yet
                pass
            if self._present:
                # Another one that calls a roll there may be of a later start.
                cluster = self._cluster
                is_service = cluster.is_chief or cluster.coordinator is not None
                who = "the coordinator" if is_service else "worker 0"
                raise self._incomplete(
                    f": {who} at {self._where} ended before that."
                )
            time.sleep(min(0.2, left))
        raise self._incomplete(f" within {timeout:g} seconds.{self._hint()}")

    def ask(self) -> None:
        """Raises the reason if who calls the roll there refuses this worker."""
        with contextlib.suppress(OSError):
            self._is_complete(time.monotonic() + _ASKING)

    def _is_complete(self, deadline: float) -> bool:
        """Tells whether all workers came before the connection ended."""

        def left() -> float:
            return max(deadline - time.monotonic(), 0.01)

        with (
            socket.create_connection(
                resolve(self._where), left()
            ) as connection,
            connection.makefile("rb") as lines,
        ):
            self._has_met = True
            connection.sendall(self._line)
            while True:
                connection.settimeout(left())
                message = _parsed(lines.readline(LONGEST))
                if "refused" in message:
                    raise ClusterError(message["refused"])
                if not message or "go" in message:
                    return bool(message)
                self._present = set(message["present"])
                self._turned_away = message["turned_away"]

    def _hint(self) -> str:
        if self._turned_away:
            return f" Turned away: {'; '.join(self._turned_away)}."
        if self._present:
            return ""
        what = "Nothing answered"
        if self._has_met:
            what = (
                "Something answered that is no worker of this job, which may "
                "be a job that runs already,"
            )
        return f" {what} at {self._where}, where workers join the cluster."

    def _incomplete(self, when: str) -> WorkerLostError:
        cluster = self._cluster
        missing = [
            f"worker {index} ({address})" if address else f"worker {index}"
            for index, address in enumerate(cluster.addresses)
            if index not in self._present and index != cluster.index
        ]
        return WorkerLostError(
            f"Not all workers joined{when} Missing: {', '.join(missing)}. "
            f"Expected: {cluster.num_workers} workers that run the same "
            "script. Check whether the missing workers were started, what they "
            "printed, and whether they can reach that address."
        )


def _parsed(line: bytes) -> dict[str, Any]:
    """Parses a line of the roll call; empty if it is none."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}

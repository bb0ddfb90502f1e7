"""A worker's answer to the roll call, and its wait for the others."""

import contextlib
import dataclasses
import hashlib
import json
import os
import socket
import time
from typing import Any

import keras

from keras_dist.core.plan import Cluster
from keras_dist.errors import ClusterError
from keras_dist.errors import WorkerLostError
from keras_dist.joining.addresses import resolve
from keras_dist.joining.roll_call import LONGEST
from keras_dist.joining.roll_call import Facts
from keras_dist.joining.roll_call import calling_roll


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
        WorkerLostError: If not all came in time.
    """
    facts = facts_of(cluster)
    with contextlib.ExitStack() as stack:
        if listener is not None and cluster.coordinator is None:
            stack.enter_context(calling_roll(listener, facts))
        _Answer(cluster, facts).wait(timeout)


class _Answer:
    def __init__(self, cluster: Cluster, facts: Facts) -> None:
        self._cluster = cluster
        self._where = cluster.coordinator or cluster.leader
        said = {
            "index": cluster.index,
            "process": f"process {os.getpid()} on {socket.gethostname()}",
            **dataclasses.asdict(facts),
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
                with socket.create_connection(
                    resolve(self._where), left
                ) as connection:
                    if self._is_complete(connection, deadline):
                        return
            except TimeoutError:
                continue
            except OSError:  # nothing listens there yet
                pass
            # Workers that were present have to connect again.
            self._present.clear()
            time.sleep(min(0.2, left))
        raise self._never_came(timeout)

    def _is_complete(self, connection: socket.socket, deadline: float) -> bool:
        """Tells whether all workers came before this connection ended."""
        self._has_met = True
        connection.sendall(self._line)
        with connection.makefile("rb") as lines:
            while True:
                connection.settimeout(max(deadline - time.monotonic(), 0.01))
                told = _parsed(lines.readline(LONGEST))
                if "refused" in told:
                    raise ClusterError(told["refused"])
                if not told or "go" in told:
                    return bool(told)
                self._present = set(told["present"])
                self._turned_away = told["turned_away"]

    def _never_came(self, timeout: float) -> WorkerLostError:
        cluster, where = self._cluster, self._where
        missing = [
            f"worker {index} ({address})" if address else f"worker {index}"
            for index, address in enumerate(cluster.addresses)
            if index not in self._present and index != cluster.index
        ]
        met = ""
        if self._turned_away:
            met = f" Turned away: {'; '.join(self._turned_away)}."
        elif not self._present:
            what = (
                "Something answered that is no worker of this job, which may "
                "be a job that runs already,"
                if self._has_met
                else "Nothing answered"
            )
            met = f" {what} at {where}, where workers join the cluster."
        return WorkerLostError(
            f"Not all workers joined within {timeout:g} seconds.{met} Missing: "
            f"{', '.join(missing)}. Expected: {cluster.num_workers} workers "
            "that run the same script. Check whether the missing workers were "
            "started, what they printed, and whether they can reach that "
            "address."
        )


def _parsed(line: bytes) -> dict[str, Any]:
    """Parses a line of the roll call; empty if it is none."""
    try:
        told = json.loads(line)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}

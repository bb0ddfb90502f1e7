"""The roll call: the process where workers meet waits until all are there.

It needs no Keras. One process calls the roll, the first worker's or a
coordinator's; a worker answers with a line of JSON: its position, its process,
and its `Facts`. Whenever the set of workers that are there changes, each gets a
line with their positions, and with those that were turned away. Then one of two
lines comes: `go`, after which the worker closes the connection, or the reason
why it is refused.
"""

import contextlib
import dataclasses
import json
import os
import select
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

# The package is above this layer, and loaded before it.
_VERSION: str = sys.modules["keras_dist"].__version__
# Bytes of the longest line.
LONGEST = 65536
# How many workers that were turned away are remembered.
_MOST = 8
_ADVICE = {
    "job": (
        "Each job needs ports of its own: choose other ones (in TF_CONFIG, by "
        "`port_base` of SlurmClusterResolver, by MASTER_PORT of torchrun and "
        "MPI), or start workers with `keras-dist run`, which finds free ones. "
        "Workers of one job need the same list of addresses. End workers that "
        "are left from an earlier start."
    ),
    "workers": "Compare the environment variables of all workers.",
    "backend": "Set KERAS_BACKEND to the same value for all workers.",
    "version": "Install the same version of keras_dist for all workers.",
}


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts that workers of one job have in common.

    Args:
        job: String, the job's word; see `Cluster`.
        workers: Integer, their number.
        backend: String, the Keras backend.
        version: String, keras_dist's version. Default the one that is here.
    """

    job: str
    workers: int
    backend: str
    version: str = _VERSION


class _Worker(NamedTuple):
    """A worker that is there."""

    connection: socket.socket
    process: str
    token: Any  # that no other process has


def call_roll(
    listener: socket.socket, facts: Facts, parent: object = None
) -> None:
    """Waits until each worker of a job has said that it is there.

    Args:
        listener: The socket at which workers connect.
        facts: `Facts` of the job. A worker of another job is refused, and the
            others go on waiting. If one of this job differs, or is there
            twice, all are refused, also those that have not come yet.
        parent: A file whose end means that no process needs the roll any more.

    Raises:
        EOFError: At the end of `parent`.
    """
    with contextlib.ExitStack() as connections:
        _Roll(listener, facts, connections).call(parent)


class _Roll:
    def __init__(
        self,
        listener: socket.socket,
        facts: Facts,
        connections: contextlib.ExitStack,
    ) -> None:
        self._listener = listener
        self._facts = facts
        self._connections = connections
        self._present: dict[int, _Worker] = {}
        self._unnamed: list[socket.socket] = []
        self._turned_away: list[str] = []
        # By position, why a worker that comes is refused, with the others.
        self._refused: dict[int, str] = {}
        self._last_news: dict[str, Any] = {}

    def call(self, parent: Any) -> None:
        while len(self._present) < self._facts.workers:
            watched = [
                self._listener,
                *self._unnamed,
                *(worker.connection for worker in self._present.values()),
                *([] if parent is None else [parent]),
            ]
            ready, _, _ = select.select(watched, [], [])
            if parent in ready:
                raise EOFError("No process needs the roll any more.")
            for index, worker in list(self._present.items()):
                # Workers send one line: readable means closed.
                if worker.connection in ready:
                    worker.connection.close()
                    del self._present[index]
            for connection in [c for c in self._unnamed if c in ready]:
                self._unnamed.remove(connection)
                self._admit(connection)
            if self._listener in ready:
                connection, _ = self._listener.accept()
                self._connections.enter_context(connection)
                self._unnamed.append(connection)
            self._tell_news()
        self._tell_all(go=True)
        for connection, *_ in self._present.values():
            # The side that closes first keeps the address in use for a while.
            # That must be the worker, as the framework's service takes it.
            connection.settimeout(5)
            with contextlib.suppress(OSError):
                while connection.recv(1024):
                    pass

    def _admit(self, connection: socket.socket) -> None:
        """Hears who has connected, and refuses who does not belong here."""
        said = _heard(connection)
        index, process = said.get("index", -1), said.get("process", "")
        differing = [
            name
            for name, value in dataclasses.asdict(self._facts).items()
            if said.get(name) != value
        ]
        there = self._present.get(index)
        if not said:
            connection.close()
        elif "job" in differing:
            who = f"worker {index} of {_shown(said.get('job'))}, {process}"
            self._turned_away = [*self._turned_away[1 - _MOST :], who]
            _tell(connection, refused=self._of_another_job(who))
            connection.close()
        elif differing:
            self._refuse_all(index, connection, self._misfit(said, differing))
        elif there is not None and there.token != said.get("token"):
            self._refuse_all(
                index,
                connection,
                f"Two processes are worker {index} of {self._facts.job!r}. "
                f"Received: {there.process}, and {process}. Expected: each "
                "position once. Give each worker its own, and end workers that "
                "are left from an earlier start.",
            )
        elif index in self._refused:
            _tell(connection, refused=self._refused.pop(index))
            connection.close()
        else:
            token = said.get("token")
            self._present[index] = _Worker(connection, process, token)
            self._last_news = {}

    def _of_another_job(self, who: str) -> str:
        host, port, *_ = self._listener.getsockname()
        return (
            f"Workers of another job meet at {host}:{port}. Received: {who}. "
            f"Expected: workers of {self._facts.job!r}. {_ADVICE['job']}"
        )

    def _misfit(self, said: dict[str, Any], differing: list[str]) -> str:
        received, expected = (
            ", ".join(f"{name}={_shown(of.get(name))}" for name in differing)
            for of in (said, dataclasses.asdict(self._facts))
        )
        return (
            f"The workers of {self._facts.job!r} do not fit together. "
            f"Received: {received} from worker {said['index']}, "
            f"{said['process']}. Expected: {expected}, as where the workers "
            f"meet. {' '.join(_ADVICE[name] for name in differing)}"
        )

    def _refuse_all(
        self, index: int, connection: socket.socket, reason: str
    ) -> None:
        """Refuses a new worker, those that are there, and those to come."""
        _tell(connection, refused=reason)
        connection.close()
        to_come = {*range(self._facts.workers)} - {index, *self._present}
        self._refused = dict.fromkeys(to_come, reason)
        self._tell_all(refused=reason)
        for worker in self._present.values():
            worker.connection.close()
        self._present.clear()

    def _tell_news(self) -> None:
        """Tells who is there, and who was turned away, if that has changed."""
        news = {
            "present": sorted(self._present),
            "turned_away": self._turned_away,
        }
        if news != self._last_news:
            self._tell_all(**news)
        self._last_news = news

    def _tell_all(self, **message: Any) -> None:
        for worker in self._present.values():
            _tell(worker.connection, **message)


@contextlib.contextmanager
def calling_roll(listener: socket.socket, facts: Facts) -> Iterator[None]:
    """Calls the roll in a thread, until the context ends."""
    parent, end = os.pipe()

    def call() -> None:
        with contextlib.suppress(EOFError):
            call_roll(listener, facts, parent)

    thread = threading.Thread(target=call, name="keras_dist-roll", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(end)
        thread.join()
        os.close(parent)


def _heard(connection: socket.socket) -> dict[str, Any]:
    """Reads the line of a new connection; empty if it is no worker's."""
    connection.settimeout(1)
    try:
        with connection.makefile("rb") as lines:
            said = json.loads(lines.readline(LONGEST))
        said["index"], said["process"] = (
            int(said["index"]),
            str(said["process"]),
        )
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    return dict(said)


def _tell(connection: socket.socket, **message: Any) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."

"""Loops that run in one process for each replica."""

import contextlib
import threading
from collections.abc import Callable
from collections.abc import Mapping
from contextlib import AbstractContextManager
from multiprocessing.connection import Client
from multiprocessing.connection import Connection
from multiprocessing.connection import Listener
from typing import Any
from typing import NoReturn

from keras_dist.bench.loops import Loop
from keras_dist.errors import KerasDistError
from keras_dist.launch.function import launch

# Makes the loops of a worker, by name, when it starts.
MakeLoops = Callable[[], AbstractContextManager[Mapping[str, Loop]]]


class ProcessesError(KerasDistError, RuntimeError):
    """Raised when a worker process of a measurement has failed."""


class Processes:
    """Workers on this machine that run the loops they are asked for."""

    def __init__(self, make: MakeLoops, num_workers: int) -> None:
        self._make = make
        self._num_workers = num_workers
        self._connections: list[Connection] = []
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def loop(self, name: str) -> Loop:
        """Returns a loop of all workers; the first call starts them."""
        if self._thread is None:
            self._start()
        return _LoopOfAll(self, name)

    def run(self, name: str, steps: int) -> float:
        """Runs a loop on all workers, and returns the mean of their losses."""
        try:
            for connection in self._connections:
                connection.send((name, steps))
        except OSError:
            # A worker that has ended does not read any more.
            self._fail()
        losses = self._answers()
        return sum(losses) / len(losses)

    def close(self) -> None:
        """Ends the workers; a second call does nothing."""
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        try:
            # The socket is in a folder that only this user can open.
            with Listener(family="AF_UNIX") as listener:
                self._thread = threading.Thread(
                    target=self._launch,
                    args=(listener.address,),
                    name="bench-processes",
                )
                self._thread.start()
                while len(self._connections) < self._num_workers:
                    self._connections.append(listener.accept())
            self._answers()
        except BaseException:
            self.close()
            raise

    def _launch(self, address: Any) -> None:
        try:
            launch(
                serve,
                (address, self._make),
                workers=self._num_workers,
                devices=1,
            )
        except BaseException as error:
            # It is raised in the thread that runs the loop.
            self._error = error
            # That thread may wait for workers, which do not connect any more.
            with contextlib.suppress(OSError):
                for _ in range(self._num_workers):
                    Client(address).close()

    def _answers(self) -> list[float]:
        try:
            return [connection.recv() for connection in self._connections]
        except (EOFError, OSError):
            self._fail()

    def _fail(self) -> NoReturn:
        self.close()
        raise ProcessesError(
            f"One of {self._num_workers} worker processes has failed: "
            f"{self._error}. Its output is above."
        ) from self._error


class _LoopOfAll(Loop):
    def __init__(self, processes: Processes, name: str) -> None:
        self._processes = processes
        self._name = name

    def run(self, steps: int) -> float:
        return self._processes.run(self._name, steps)

    def close(self) -> None:
        self._processes.close()


def serve(address: Any, make: MakeLoops) -> None:
    """Connects a worker to the socket, and runs loops until it closes."""
    with Client(address) as connection, make() as loops:
        connection.send(0.0)
        while True:
            try:
                name, steps = connection.recv()
            except EOFError:
                return
            connection.send(loops[name].run(steps))

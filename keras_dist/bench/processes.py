"""Loops that run in one process for each replica."""

import contextlib
import json
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from typing import NoReturn

from keras_dist.bench.loops import Loop
from keras_dist.errors import KerasDistError
from keras_dist.launch.function import launch

# Makes the loops of a worker, by name, when it starts.
MakeLoops = Callable[[], AbstractContextManager[Mapping[str, Loop]]]

_TURN_SECONDS = 0.5


class ProcessesError(KerasDistError, RuntimeError):
    """Raised when a worker process of a measurement has failed."""


class Processes:
    """Workers on this machine that run the loops they are asked for.

    They connect to a socket in a folder that only this user can open.
    """

    def __init__(self, make: MakeLoops, num_workers: int) -> None:
        self._make = make
        self._num_workers = num_workers
        self._files: list[Any] = []
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
            for file in self._files:
                _send(file, [name, steps])
            losses = [self._answer(file) for file in self._files]
        except OSError:
            # A worker that has ended does not read any more.
            self._fail()
        return sum(losses) / len(losses)

    def close(self) -> None:
        """Ends the workers; a second call does nothing."""
        files, self._files = self._files, []
        for file in files:
            # What was not sent to a worker that has ended is sent again here.
            with contextlib.suppress(OSError):
                file.close()
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        folder = tempfile.mkdtemp(prefix="keras-dist-")
        try:
            path = str(Path(folder, "socket"))
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path)
                listener.listen(self._num_workers)
                listener.settimeout(_TURN_SECONDS)
                self._thread = threading.Thread(
                    target=self._launch, args=(path,), name="bench-processes"
                )
                self._thread.start()
                while len(self._files) < self._num_workers:
                    self._accept(listener)
            for file in self._files:
                self._answer(file)
        except BaseException:
            self.close()
            raise
        finally:
            shutil.rmtree(folder)

    def _launch(self, path: str) -> None:
        try:
            launch(
                serve, (path, self._make), workers=self._num_workers, devices=1
            )
        except BaseException as error:
            # It is raised in the thread that runs the loop.
            self._error = error

    def _accept(self, listener: socket.socket) -> None:
        assert self._thread is not None
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if not self._thread.is_alive():
                self._fail()
            return
        with connection:
            connection.setblocking(True)
            self._files.append(connection.makefile("rw"))

    def _answer(self, file: Any) -> float:
        line = file.readline()
        if not line:
            self._fail()
        return float(json.loads(line))

    def _fail(self) -> NoReturn:
        self.close()
        raise ProcessesError(
            f"One of {self._num_workers} worker processes has failed: "
            f"{self._error}. What it wrote is above."
        ) from self._error


class _LoopOfAll(Loop):
    def __init__(self, processes: Processes, name: str) -> None:
        self._processes = processes
        self._name = name

    def run(self, steps: int) -> float:
        return self._processes.run(self._name, steps)

    def close(self) -> None:
        self._processes.close()


def serve(path: str, make: MakeLoops) -> None:
    """Connects a worker to the socket, and runs loops until it closes."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        with make() as loops, connection.makefile("rw") as file:
            _send(file, 0.0)
            for line in file:
                name, steps = json.loads(line)
                _send(file, loops[name].run(steps))


def _send(file: Any, what: Any) -> None:
    file.write(json.dumps(what) + "\n")
    file.flush()

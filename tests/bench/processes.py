"""Arms that run in one process for each replica."""

import contextlib
import functools
import threading
from multiprocessing.connection import Client
from multiprocessing.connection import Listener

import keras_dist


class Processes:
    """Workers on this machine that run the arms they are asked for.

    `make` returns a context manager, in each of them, that yields its arms.
    """

    def __init__(self, make, num_workers):
        self._make = make
        self._num_workers = num_workers
        self._connections = []
        self._thread = None
        self._error = None

    def arm(self, name):
        """Returns an arm of all workers; the first call starts them."""
        if self._thread is None:
            self._start()
        return functools.partial(self._run, name)

    def close(self):
        """Ends the workers; a second call does nothing."""
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()
        if self._thread is not None:
            self._thread.join()

    def _run(self, name, steps):
        """Returns the mean of the losses of all workers."""
        try:
            for connection in self._connections:
                connection.send((name, steps))
            losses = [connection.recv() for connection in self._connections]
        except (EOFError, OSError):
            self.close()
            raise RuntimeError("A worker has failed.") from self._error
        return sum(losses) / len(losses)

    def _start(self):
        # The socket is in a folder that only this user can open.
        with Listener(family="AF_UNIX") as listener:
            self._thread = threading.Thread(
                target=self._launch, args=(listener.address,)
            )
            self._thread.start()
            while len(self._connections) < self._num_workers:
                self._connections.append(listener.accept())

    def _launch(self, address):
        arguments = address, self._make
        try:
            keras_dist.launch(
                serve, arguments, workers=self._num_workers, devices=1
            )
        except BaseException as error:
            # It is raised in the thread that runs the arm, which may wait for
            # workers that do not connect any more.
            self._error = error
            with contextlib.suppress(OSError):
                for _ in range(self._num_workers):
                    Client(address).close()


def serve(address, make):
    """Connects a worker to the socket, and runs arms until it closes."""
    with Client(address) as connection, make() as arms:
        while True:
            try:
                name, steps = connection.recv()
            except EOFError:
                return
            connection.send(arms[name](steps))

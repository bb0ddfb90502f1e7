"""The end of a worker's process: at once, whatever has become of the others.

At exit JAX waits for programs that never end once a worker is lost, and it
aborts the process when it loses its coordinator.
"""

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from keras_dist.errors import RESTART_EXIT_CODE
from keras_dist.errors import WorkerLostError
from keras_dist_jax.addresses import resolve
from keras_dist_jax.runtime_internals import drop_clean_up
from keras_dist_jax.watch import Watch

# Handlers that C calls, which must never be collected.
_KEPT: list[Any] = []


class Leaving:
    """The end of this worker's process, with the exit status for its state.

    Attributes:
        watch: The `Watch`, once the cluster was joined.
        coordinator_lost: Whether JAX gave up on the coordinator.
    """

    def __init__(self, coordinator: str) -> None:
        self.watch: Watch | None = None
        self.coordinator_lost = False
        self._coordinator = coordinator
        self._status: int | None = None
        self._before = sys.excepthook
        sys.excepthook = self._uncaught
        # Handlers run in reverse order: this one before JAX's own.
        atexit.register(self._at_exit)
        _KEPT.append(_on_abort(self._aborting))

    def _uncaught(
        self,
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        self._status = 1
        if issubclass(kind, WorkerLostError):
            self._status = RESTART_EXIT_CODE
        elif issubclass(kind, KeyboardInterrupt):
            self._status = 128 + signal.SIGINT
        self._before(kind, error, traceback)
        if self.watch is not None:
            self.watch.fail(error, self._status)

    def _at_exit(self) -> None:
        watch = self.watch
        if self._status is None:  # no uncaught error: Python sets the status
            if watch is not None:
                watch.leave()
            if self.coordinator_lost or (watch and watch.has_raised):
                drop_clean_up()
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(self._status)

    def _aborting(self) -> None:
        """Blocks a thread that aborts because the coordinator is lost."""
        if self.watch is None or not self.watch.is_cut_off:
            with contextlib.suppress(OSError):
                address = resolve(self._coordinator)
                socket.create_connection(address, timeout=2).close()
                return
        self.coordinator_lost = True
        if self.watch is not None:
            self.watch.coordinator_lost = True
        ctypes.CDLL(None).pause()


def _on_abort(fn: Callable[[], None]) -> Any:
    """Calls `fn` in a thread that aborts, before it does.

    `signal.signal` is too late: the interpreter runs its handlers once the main
    thread gets to them, and an abort does not wait.
    """
    library = ctypes.CDLL(None, use_errno=True)
    handler_type = ctypes.CFUNCTYPE(None, ctypes.c_int)
    library.signal.restype = ctypes.c_void_p
    library.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)

    def handle(number: int) -> None:
        fn()
        # `fn` has returned, so the abort is another's: the handler from before
        # gets the signal when this one returns.
        library.signal(number, before)
        getattr(library, "raise")(number)

    handler = handler_type(handle)
    before = library.signal(
        signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p)
    )
    return handler

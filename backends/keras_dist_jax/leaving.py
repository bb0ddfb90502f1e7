"""How a worker ends: at once, whatever has become of the others.

JAX waits at exit for what it has started, which nobody finishes once a worker
is lost, and aborts the process when it loses its coordinator.
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

# What must never be collected: what C calls.
_KEPT: list[Any] = []


class Leaving:
    """Ends this worker's process in the way that its state asks for.

    Args:
        coordinator: String, the coordinator's `"host:port"`.

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
        # After JAX's own, so before it.
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
        if self._status is None:  # only Python knows what it is to be
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
        """Keeps the thread that aborts from it, if that is for a lost peer."""
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

    Not `signal.signal`: the interpreter runs those when the main thread gets
    to it, and an abort does not wait.
    """
    library = ctypes.CDLL(None, use_errno=True)
    handler_type = ctypes.CFUNCTYPE(None, ctypes.c_int)
    library.signal.restype = ctypes.c_void_p
    library.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)

    def handle(number: int) -> None:
        fn()
        # Not ours: whoever was there before is called when this returns.
        library.signal(number, before)
        getattr(library, "raise")(number)

    handler = handler_type(handle)
    before = library.signal(
        signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p)
    )
    return handler

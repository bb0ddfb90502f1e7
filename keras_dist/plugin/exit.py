"""Leaving a cluster when the process ends, however it ends."""

import atexit
import contextlib
import functools
import os
import sys
from types import TracebackType

from keras_dist.errors import RESTART_EXIT_CODE
from keras_dist.errors import WorkerLostError
from keras_dist.plugin.workers import Workers

# The workers that this process is one of, once it has joined them.
_joined: list[Workers] = []
# Why the process ends, the last one.
_reasons = ["ended"]


@functools.cache
def watch_exceptions() -> None:
    """Notes the exception that ends the process.

    Where it is a `WorkerLostError`, or comes of a lost worker, the exit
    status is 42, which asks to be started again.
    """
    hook = sys.excepthook

    def excepthook(
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        explained = error
        for workers in _joined if isinstance(error, Exception) else ():
            explained = workers.explain(error)
        if explained is not error:
            explained.__cause__ = error
            kind, traceback = type(explained), explained.__traceback__
        _reasons.append(f"ended with {kind.__name__}: {explained}")
        hook(kind, explained, traceback)
        if not isinstance(explained, WorkerLostError):
            return
        if not _joined:
            raise SystemExit(RESTART_EXIT_CODE)
        for workers in _joined:
            workers.leave(_reasons[-1], failed=True)
        # What waits for the lost one may never end by itself.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(RESTART_EXIT_CODE)

    sys.excepthook = excepthook


@functools.cache
def leave_at_exit(workers: Workers) -> None:
    """Makes a worker tell the others when its process ends, and why.

    Args:
        workers: The `Workers` that it is one of.
    """

    def leave() -> None:
        workers.leave(_reasons[-1], failed=len(_reasons) > 1)

    watch_exceptions()
    _joined.append(workers)
    atexit.register(leave)

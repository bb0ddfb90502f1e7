"""Leaving a cluster at the end of the process, failed or not."""

import atexit
import contextlib
import functools
import os
import sys
from types import TracebackType

from keras_dist.errors import RESTART_EXIT_CODE
from keras_dist.errors import WorkerLostError
from keras_dist.plugin.workers import Workers

# The clusters that this process has joined.
_joined: list[Workers] = []
# Reasons why the process ends; the last one counts.
_reasons = ["ended"]


@functools.cache
def watch_exceptions() -> None:
    """Installs an exception hook that tells other workers why this one ends.

    For a `WorkerLostError`, or another exception that a lost worker caused,
    the exit status is 42, which asks for a restart.
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
        # Threads that wait for the lost worker may never end by themselves.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(RESTART_EXIT_CODE)

    sys.excepthook = excepthook


@functools.cache
def leave_at_exit(workers: Workers) -> None:
    """Makes this process tell its cluster when and why it ends."""

    def leave() -> None:
        workers.leave(_reasons[-1], failed=len(_reasons) > 1)

    watch_exceptions()
    _joined.append(workers)
    atexit.register(leave)

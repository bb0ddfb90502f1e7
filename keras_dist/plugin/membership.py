"""Membership of this process in a cluster, until it leaves."""

import atexit
import contextlib
import contextvars
import functools
import os
import sys
import warnings
from collections.abc import Iterator
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from keras_dist.errors import RESTART_EXIT_CODE
from keras_dist.errors import WorkerLostError
from keras_dist.plugin.workers import Workers

# The clusters that this process has joined.
_left_at_exit: list[Workers] = []
# Reasons why the process ends; the last one counts.
_reasons = ["ended"]


@functools.cache
def watch_exceptions() -> None:
    """Installs an exception hook that tells other workers why this one ends,
    and exits with a status that asks for a restart if one was lost."""
    hook = sys.excepthook

    def excepthook(
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        explained = error
        for workers in _left_at_exit if isinstance(error, Exception) else ():
            explained = workers.explain(error)
        if explained is not error:
            explained.__cause__ = error
            kind, traceback = type(explained), explained.__traceback__
        _reasons.append(f"ended with {kind.__name__}: {explained}")
        hook(kind, explained, traceback)
        if not isinstance(explained, WorkerLostError):
            return
        if not _left_at_exit:
            raise SystemExit(RESTART_EXIT_CODE)
        for workers in _left_at_exit:
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
    _left_at_exit.append(workers)
    atexit.register(leave)


# A file that `keras-dist run` looks for when the worker ends.
JOINED_FILE = "KERAS_DIST_JOINED_FILE"
# Set to 1 by `keras-dist run --independent`.
INDEPENDENT = "KERAS_DIST_INDEPENDENT"

_joined: set[int] = set()


def note_joined() -> None:
    """Notes that this process has joined a cluster, and tells its launcher."""
    _joined.add(os.getpid())
    path = os.environ.get(JOINED_FILE)
    if not path:
        return
    try:
        Path(path).touch()
    except OSError as error:
        warnings.warn(
            "This worker can't tell its launcher that it joined the others: "
            f"{error}. `keras-dist run` will treat this worker as one that "
            "trained alone. Allow workers to write to that folder, or pass "
            "--independent.",
            stacklevel=2,
        )


def has_joined() -> bool:
    """Returns true if this process belongs to a cluster."""
    return os.getpid() in _joined


def is_independent(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns true if the user wants workers to train independently."""
    return environ.get(INDEPENDENT, "0") not in ("", "0")


_on_purpose = contextvars.ContextVar("keras_dist_trains_alone", default=False)


@contextlib.contextmanager
def alone_on_purpose() -> Iterator[None]:
    """Allows each worker to train models of its own inside the context."""
    token = _on_purpose.set(True)
    try:
        yield
    finally:
        _on_purpose.reset(token)


def is_alone_on_purpose() -> bool:
    """Returns whether `alone_on_purpose` is open."""
    return _on_purpose.get()

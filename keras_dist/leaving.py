"""Leaving a cluster when the process ends, however it ends."""

import atexit
import functools
import sys
from types import TracebackType

from keras_dist.errors import RESTART_EXIT_CODE
from keras_dist.errors import WorkerLostError
from keras_dist.workers import Workers

_REASON = "ended"


@functools.cache
def leave_at_exit(workers: Workers) -> None:
    """Makes a worker tell the others when its process ends, and why.

    A process that ends with a `WorkerLostError` has the exit status 42, which
    asks to be started again.

    Args:
        workers: The `Workers` that it is one of.
    """
    reasons = [_REASON]
    hook = sys.excepthook

    def excepthook(
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        reasons.append(f"ended with {kind.__name__}: {error}")
        hook(kind, error, traceback)
        if isinstance(error, WorkerLostError):
            raise SystemExit(RESTART_EXIT_CODE)

    def leave() -> None:
        workers.leave(reasons[-1], failed=len(reasons) > 1)

    sys.excepthook = excepthook
    atexit.register(leave)

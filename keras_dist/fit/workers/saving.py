"""Saving in a thread, for which later savings and the program's end wait."""

import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future

from keras_dist.internals import python_internals


class Saving(Future[None]):
    """A `Future` whose error is raised once: by it, or by the next saving."""

    def result(self, timeout: float | None = None) -> None:
        try:
            super().result(timeout)
        finally:
            if self.done() and self in _pending:
                _pending.remove(self)

    def run(self, fn: Callable[[], None]) -> None:
        try:
            fn()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(None)


# The one whose result nobody has asked for.
_pending: list[Saving] = []


def start(fn: Callable[[], None], wait: bool) -> Future[None]:
    """Calls a function here, or in a thread that the program's end waits for.

    Call `wait` before.
    """
    saving = Saving()
    saving.set_running_or_notify_cancel()
    if wait:
        fn()
        saving.set_result(None)
        return saving
    _pending.append(saving)
    python_internals.call_before_threads_end(_wait_at_exit)
    threading.Thread(
        target=saving.run, args=(fn,), name="keras_dist-saving"
    ).start()
    return saving


def wait() -> None:
    """Waits for a saving under way, and raises its error."""
    for saving in _pending.copy():
        saving.result()


def _wait_at_exit() -> None:
    """Waits, and prints an error, which nothing can raise any more."""
    for saving in _pending:
        error = saving.exception()
        if error is not None:
            print(
                "keras_dist.save_sharded(wait=False) failed, and the program "
                "ended without a look at its result:",
                file=sys.stderr,
            )
            traceback.print_exception(error)

"""Private names of Python's standard library."""

import functools
import threading
from collections.abc import Callable


@functools.cache
def call_before_threads_end(fn: Callable[[], None]) -> None:
    """Has the program's end call a function while pools still take work.

    Functions of `atexit` are called later: after all pools are closed, which
    threads of frameworks use to finish their files.
    """
    threading._register_atexit(fn)  # type: ignore[attr-defined]

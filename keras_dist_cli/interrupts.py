"""Ctrl-C, which is not to be lost."""

import signal
import threading
from types import FrameType
from types import TracebackType
from typing import Any
from typing import Self


class Interrupts:
    """A context in which Ctrl-C is remembered, and raised as ever.

    Keras ignores all that is raised while it reads the logs of a batch, where
    JAX spends most of the time. Whoever knows of such a place calls `check`
    after it. A Ctrl-C that the process was started to ignore, as `nohup`
    does, stays ignored.

    Attributes:
        received: Boolean, whether there was one.
    """

    def __init__(self) -> None:
        self.received = False
        self._previous: Any = None

    def __enter__(self) -> Self:
        before = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and before is signal.default_int_handler:
            self._previous = signal.signal(signal.SIGINT, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def check(self) -> None:
        """Raises KeyboardInterrupt if there was one, seen or not."""
        if self.received:
            raise KeyboardInterrupt

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        raise KeyboardInterrupt

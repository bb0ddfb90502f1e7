"""A context that remembers Ctrl-C where Keras ignores it."""

import signal
import threading
from types import FrameType
from types import TracebackType
from typing import Any
from typing import Self


class Interrupts:
    """A context in which Ctrl-C raises KeyboardInterrupt and is remembered.

    Keras ignores every exception that is raised while it reads the logs of a
    batch, where JAX spends most of the time. Code that runs after such a place
    calls `check`. A process that was started with Ctrl-C ignored, such as a
    background job of a shell script, goes on ignoring it. `received` is true
    after a Ctrl-C.
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
        """Raises KeyboardInterrupt if there was a Ctrl-C, even if ignored."""
        if self.received:
            raise KeyboardInterrupt

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        raise KeyboardInterrupt

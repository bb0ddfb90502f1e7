"""Signals to the launcher, passed on to its workers."""

import signal
from types import FrameType
from types import TracebackType
from typing import Any

from keras_dist.launch.launcher.group import ProcessGroup

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """A context in which the launcher's signals go to the workers.

    A second Ctrl-C kills them at once. A signal that the launcher was started
    to ignore, such as SIGHUP under `nohup`, stays ignored. `received` lists the
    signals' numbers.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self.group: ProcessGroup | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Signals":
        for number in PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        again = number == signal.SIGINT and number in self.received
        self.received.append(number)
        if self.group is None:
            return
        if again:
            self.group.kill()
        else:
            self.group.stop(number)

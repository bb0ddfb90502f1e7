"""Profiler: one framework's profiler, which records a process."""

import contextlib
from abc import ABC
from abc import abstractmethod


class Profiler(ABC):
    """A framework's profiler. A process has one, and one recording at a time.

    `strategy.profile` calls the methods, all in one thread.
    """

    @abstractmethod
    def start(self, folder: str) -> None:
        """Starts to record, once the work before it is done.

        Args:
            folder: String, where files for TensorBoard are written.

        Raises:
            Exception: Any, if the program itself runs the framework's
                profiler already.
        """

    @abstractmethod
    def stop(self) -> None:
        """Ends the recording, with all work until now, and writes it."""

    @abstractmethod
    def step(self, number: int) -> contextlib.AbstractContextManager[object]:
        """Returns a context, recorded as the training step of a number."""

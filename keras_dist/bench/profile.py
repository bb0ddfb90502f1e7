"""Counts of what Python does in a step."""

import gc
import sys
import threading
from collections.abc import Callable
from collections.abc import Collection
from types import CodeType
from types import FrameType
from typing import Any

from keras_dist.bench.loops import Loop


class Profile:
    """Counts calls while it is open.

    Args:
        wanted: Collection of code objects, whose calls are counted apart.
    """

    def __init__(self, wanted: Collection[CodeType] = ()) -> None:
        self._wanted = wanted
        # In the thread that opened it.
        self.calls = 0
        # In that thread, and in those that started meanwhile.
        self.of_wanted = 0

    def __enter__(self) -> "Profile":
        self._before = sys.getprofile(), threading.getprofile()
        threading.setprofile(self._elsewhere)
        sys.setprofile(self._here)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._before[0])
        threading.setprofile(self._before[1])

    def _here(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.calls += 1
            self.of_wanted += frame.f_code in self._wanted

    def _elsewhere(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.of_wanted += frame.f_code in self._wanted


def calls_a_step(loop: Loop, steps: int) -> float:
    """Python functions that a step calls in this thread.

    Args:
        loop: `Loop`, which is warm.
        steps: Integer, how many to count in.
    """

    def calls(steps: int) -> int:
        # Some libraries are called when garbage is collected.
        gc.collect()
        gc.disable()
        try:
            with Profile() as profile:
                loop.run(steps)
        finally:
            gc.enable()
        return profile.calls

    number = a_step(calls, steps)
    assert number is not None
    return number


def a_step(in_steps: Callable[[int], int | None], steps: int) -> float | None:
    """What a step adds, free of what a block costs, however long.

    Args:
        in_steps: Callable that takes a number of steps and counts in them.
        steps: Integer, how many to count in.
    """
    few, many = in_steps(steps), in_steps(2 * steps)
    if few is None or many is None:
        return None
    # A socket that was closed meanwhile is not counted any more.
    return max(0.0, (many - few) / steps)

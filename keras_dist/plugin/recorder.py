"""A flight recorder: what a worker has exchanged with the others, in order."""

import os
import sys
import threading
import zlib
from collections import deque
from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple

from keras_dist.errors import ReplicaDivergenceError

# How many calls the others can still compare with their own.
_KEPT = 32
# Hexadecimal digits of a code.
_DIGITS = 8


class Call(NamedTuple):
    """An exchange or a program of all workers, and the words for it."""

    key: str
    text: str


class Record(NamedTuple):
    """A call: its number, a hash of it and of all before, and its words."""

    number: int
    code: int  # below 2**32
    text: str


_START = Record(0, 0, "the start")


class FlightRecorder:
    """The calls of a worker that all workers make: exchanges and programs.

    Workers that do the same have equal codes at each number. After workers
    were found apart, all begin anew: the round says how often.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._round = 0
        self._entries: deque[Record] = deque(maxlen=_KEPT)
        self._entries.append(_START)
        # How often `count` was asked since a call.
        self._asked = _START, 0

    def note(self, call: Call) -> Record:
        """Records a call that this worker makes now."""
        with self._lock:
            number, before, _ = self._entries[-1]
            code = zlib.crc32(call.key.encode(), before)
            entry = Record(number + 1, code, call.text)
            self._entries.append(entry)
            return entry

    def take_back(self, entry: Record) -> None:
        """Removes the last call, which came to nothing."""
        with self._lock:
            if self._entries[-1] is entry:
                self._entries.pop()

    def begin_again(self) -> None:
        """Forgets all calls, on all workers, after they were found apart."""
        with self._lock:
            self._round += 1
            self._entries.clear()
            self._entries.append(_START)

    @property
    def last(self) -> str:
        """The words of the last call."""
        return self._entries[-1].text

    def count(self) -> str:
        """Returns how many calls there were, and how often this was asked
        since the last one."""
        with self._lock:
            last = self._entries[-1]
            if self._asked[0] is not last:
                self._asked = last, 0
            self._asked = last, self._asked[1] + 1
            return f"{self._round}-{last.number}-{self._asked[1]}"

    def told(self) -> str:
        """Returns the last calls for the other workers, in one line."""
        with self._lock:
            entries, number = [*self._entries], self._round
        codes = "".join(f"{entry.code:0{_DIGITS}x}" for entry in entries)
        last = entries[-1]
        text = last.text.replace("\n", " ")[:200]
        return f"{number} {last.number} {codes} {text}"

    def apart_from(self, told: str) -> tuple[str, str] | None:
        """Compares another worker's `told` with the calls of this one.

        Returns:
            The words of this worker's call and of the other one's, if they
            differ at a number that both still know; else `None`.
        """
        words = told.split(" ", 3)
        if len(words) < 4:
            return None
        number, codes = int(words[1]), words[2]
        first = number - len(codes) // _DIGITS + 1
        with self._lock:
            if int(words[0]) != self._round:
                return None
            for entry in self._entries:
                place = entry.number - first
                if entry.number > number or place < 0:
                    continue
                theirs = codes[_DIGITS * place : _DIGITS * (place + 1)]
                if int(theirs, 16) != entry.code:
                    return entry.text, words[3]
        return None

    def ahead_in(self, told: str) -> str:
        """Returns the words of another worker's call, if this one has made
        fewer calls; else an empty string."""
        words = told.split(" ", 3)
        with self._lock:
            last = self._entries[-1].number
            is_ahead = len(words) == 4 and (
                int(words[0]) == self._round and int(words[1]) > last
            )
        return words[3] if is_ahead else ""


def apart(
    calls: Sequence[tuple[str, str]],
) -> ReplicaDivergenceError:
    """Returns the error of workers that are at different calls.

    Args:
        calls: Sequence with, for each worker, the words for its call, and
            for the call before it. Words may be empty, if they are unknown.
    """
    differ = len({text for text, _ in calls}) > 1
    where = "; ".join(
        f"worker {index} at {text}"
        + (f", after {before}" if before and not differ else "")
        for index, (text, before) in enumerate(calls)
        if text
    )
    return ReplicaDivergenceError(
        "Workers are at different calls, so each of them would get wrong "
        f"values, or wait forever. Received: {where}. Expected: the same "
        "calls, in the same lines and order, on values of the same dtypes and "
        "shapes, on every worker. Look for code that only some workers run "
        "(such as `if task_id == 0`, or a callback that only the chief has), "
        "for data that ends earlier on one of them, and for a decision by a "
        "worker's own clock or rows."
    )


def place() -> str:
    """Returns where the user's code is: file, line and function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_users(frame):
            code = frame.f_code
            name = os.path.basename(code.co_filename)
            return f"{name}:{frame.f_lineno}, in {code.co_name}"
        frame = frame.f_back
    return ""


# Packages of which no frame is the user's code.
_PACKAGES = frozenset(
    {
        *("keras", "keras_dist", "keras_dist_jax", "keras_dist_tensorflow"),
        *("keras_dist_torch", "jax", "tensorflow", "torch", "numpy", "orbax"),
        *("contextlib", "functools", "threading", "concurrent", "runpy"),
    }
)


def _is_users(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0] not in _PACKAGES

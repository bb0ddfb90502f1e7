"""A flight recorder: what a worker has exchanged with the others, in order."""

import os
import sys
import threading
import time
import zlib
from collections import Counter
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence
from types import CodeType
from types import FrameType
from typing import Any
from typing import NamedTuple
from typing import TypeVar

from keras_dist.errors import ReplicaDivergenceError

# How many calls the others can still compare with their own.
_KEPT = 32
# Hexadecimal digits of a code.
_DIGITS = 8
# Seconds after which a call counts that may come to nothing.
_UNSURE = 10.0
_Function = TypeVar("_Function", bound=Callable[..., Any])


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
        # A call that may be taken back, and when it was made.
        self._unsure = _START, 0.0
        # How often `count` was asked for places since a call.
        self._asked: tuple[Record, Counter[str]] = _START, Counter()

    def note(self, call: Call, is_sure: bool = True) -> Record:
        """Records a call that this worker makes now.

        One that is not sure may be taken back soon."""
        with self._lock:
            number, before, _ = self._entries[-1]
            code = zlib.crc32(call.key.encode(), before)
            entry = Record(number + 1, code, call.text)
            self._entries.append(entry)
            if not is_sure:
                self._unsure = entry, time.monotonic()
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

    def count(self, place: str) -> str:
        """Returns how many calls there were, and how often this was asked
        for a place since the last one."""
        with self._lock:
            last = self._entries[-1]
            if self._asked[0] is not last:
                self._asked = last, Counter()
            asked = self._asked[1]
            asked[place] += 1
            return f"{self._round}-{last.number}-{asked[place]}"

    def _sure(self) -> list[Record]:
        """Returns the calls that count."""
        entry, since = self._unsure
        entries = [*self._entries]
        is_new = time.monotonic() - since < _UNSURE
        return entries[:-1] if entries[-1] is entry and is_new else entries

    def line(self) -> str:
        """Returns the last calls for the other workers, in one line."""
        with self._lock:
            entries, number = self._sure(), self._round
        codes = "".join(f"{entry.code:0{_DIGITS}x}" for entry in entries)
        last = entries[-1]
        text = last.text.replace("\n", " ")[:200]
        return f"{number} {last.number} {codes} {text}"

    def apart_from(self, line: str) -> tuple[str, str] | None:
        """Compares another worker's `line` with the calls of this one.

        Returns:
            The words of this worker's call and of the other one's, if they
            differ at a number that both still know; else `None`.
        """
        with self._lock:
            number, codes, text = self._heard(line)
            first = number - len(codes) // _DIGITS + 1
            for entry in self._sure():
                place = entry.number - first
                if entry.number > number or place < 0:
                    continue
                theirs = codes[_DIGITS * place : _DIGITS * (place + 1)]
                if int(theirs, 16) != entry.code:
                    return entry.text, text
        return None

    def ahead_in(self, line: str) -> str:
        """Returns the words of another worker's call, if this one has made
        fewer calls; else an empty string."""
        with self._lock:
            number, _, text = self._heard(line)
            return text if number > self._entries[-1].number else ""

    def _heard(self, line: str) -> tuple[int, str, str]:
        """Parses what `line` returned; the number is -1 for another round."""
        words = line.split(" ", 3)
        if len(words) < 4 or int(words[0]) != self._round:
            return -1, "", ""
        return int(words[1]), words[2], words[3]


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
        f"values, or wait forever.\nReceived: {where}. Expected: the same "
        "calls, in the same lines and order, on values of the same dtypes and "
        "shapes, on every worker. Look for code that only some workers run "
        "(such as `if task_id == 0`, or a callback that only the chief has), "
        "for data that ends earlier on one of them, and for a decision by a "
        "worker's own clock or rows."
    )


def place() -> str:
    """Returns where the user's code is: file, line and function."""
    return where()[1]


def where() -> tuple[str, str]:
    """Returns a place that all workers share, and that of the user's code.

    They are one, unless a function `of_its_own`, or a callback of Keras, is
    between the user's code and the call."""
    frame: FrameType | None = sys._getframe(1)
    shared_place = ""
    while frame is not None:
        if _is_users(frame):
            code = frame.f_code
            name = os.path.basename(code.co_filename)
            users_place = f"{name}:{frame.f_lineno}, in {code.co_name}"
            return shared_place or users_place, users_place
        shared_place = shared_place or _own_place(frame)
        frame = frame.f_back
    return shared_place, shared_place


def of_its_own(place: str) -> Callable[[_Function], _Function]:
    """Decorates a function that exchanges wherever the user calls it.

    Workers may call it in different lines, such as `fit` with a callback on the
    chief and without it on the others."""

    def decorate(fn: _Function) -> _Function:
        _OWN[fn.__code__] = place
        return fn

    return decorate


# The places of functions that are of their own.
_OWN: dict[CodeType, str] = {}


def _own_place(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    # A callback on the chief may have a stand-in on the others.
    if name.startswith("keras.") and ".callbacks" in name:
        return "a callback of Keras"
    return _OWN.get(frame.f_code, "")


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

"""Counts in a step: Python calls, and bytes sent over TCP."""

import contextlib
import gc
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from collections.abc import Collection
from types import CodeType
from types import FrameType
from typing import Any

from keras_dist.bench.loops import Loop

_FOLDER = "/proc/self/fd"
# The offset of `tcpi_bytes_sent`, an unsigned 64 bit integer, in Linux'
# `struct tcp_info`, and the bytes to read of that.
_OFFSET, _SIZE = 200, 256


class Profile:
    """A context that counts calls.

    Calls of the code objects `wanted` are counted apart.
    """

    def __init__(self, wanted: Collection[CodeType] = ()) -> None:
        self._wanted = wanted
        # Calls in the thread that opened the context.
        self.calls = 0
        # Calls of `wanted` in that thread, and in those that started meanwhile.
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
    """Returns the number of Python functions that a step calls in this thread.

    The loop must be warm. `steps` is the number of steps to count in.
    """

    def calls(steps: int) -> int:
        # Collecting garbage calls functions of some libraries.
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
    """Returns the count that one step adds, without a block's fixed count.

    `in_steps` counts in a number of steps; it is called for `steps` and for
    twice as many.
    """
    few, many = in_steps(steps), in_steps(2 * steps)
    if few is None or many is None:
        return None
    # The difference is negative if a socket was closed meanwhile: its bytes are
    # not counted any more.
    return max(0.0, (many - few) / steps)


def bytes_sent() -> int | None:
    """Returns the bytes sent by all TCP sockets that are open now.

    It is `None` if the system doesn't tell.
    """
    if not sys.platform.startswith("linux"):
        return None
    total = 0
    for name in os.listdir(_FOLDER):
        with contextlib.suppress(OSError):  # closed meanwhile, or not TCP
            if os.readlink(f"{_FOLDER}/{name}").startswith("socket:"):
                found = _sent_by(int(name))
                if found is None:
                    return None
                total += found
    return total


def _sent_by(descriptor: int) -> int | None:
    with socket.socket(fileno=os.dup(descriptor)) as one:
        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    # The structure was shorter before Linux 4.19.
    if len(info) < _OFFSET + 8:
        return None
    return int(struct.unpack_from("Q", info, _OFFSET)[0])

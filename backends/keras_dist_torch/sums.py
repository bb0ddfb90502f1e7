"""Large sums over workers that all of them expect, and so need no frame.

A large sum that follows the same call as last time is expected by all workers.
It needs a flag at its end only, by which a worker that wants something else
says so: it takes part with zeros, and then all compare what they want. A sum is
expected to follow itself, until something else has come after as many sums, as
at the end of an epoch.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from keras_dist.plugins import Call

# How many sums are remembered.
_MOST = 1000

Part = tuple[int, torch.dtype]  # the size and dtype of one message
Start = Callable[[torch.Tensor], Callable[[], None]]


class Sum(NamedTuple):
    """A sum in several messages: early ones, and a last one with a flag."""

    call: Call
    order: str  # by which early parts are made
    early: tuple[Part, ...]
    last: Part


class ExpectedSums:
    """The sums that all workers expect after a call.

    `start` begins to sum a flat tensor, and returns a wait for it.
    """

    def __init__(self, start: Start, device: torch.device) -> None:
        self._start = start
        self._device = device
        # By the call before it.
        self._known: dict[str, Sum] = {}
        # Calls, and how many sums up to them, after which no sum came.
        self._ends: set[tuple[str, int]] = set()
        self._before, self._count = "", 0
        self._num_sent = 0

    @property
    def expected(self) -> Sum | None:
        """The sum that all workers expect now, or `None`."""
        is_end = (self._before, self._count) in self._ends
        return None if is_end else self._known.get(self._before)

    def send_early(self, flat: torch.Tensor) -> Callable[[], None]:
        """Begins to sum the next early part of the expected sum."""
        self._num_sent += 1
        return self._start(flat)

    def give_up(self) -> None:
        """Takes part in the expected sum, if any, with zeros and the flag."""
        expected, end = self.expected, (self._before, self._count)
        sent, self._num_sent = self._num_sent, 0
        if expected is not None:
            self._limit()
            self._ends.add(end)
        if end in self._ends:
            self._count = 0
        if expected is None:
            return
        for size, dtype in expected.early[sent:]:
            self._start(torch.zeros(size, dtype=dtype, device=self._device))()
        size, dtype = expected.last
        flat = torch.zeros(size, dtype=dtype, device=self._device)
        flat[-1] = 1
        self._start(flat)()

    def agree(self, this_sum: Sum, compare: Callable[[], None]) -> None:
        """Has all workers expect a sum, and compares it if they don't."""
        before, count = self._before, self._count
        if self.expected != this_sum:
            compare()
            self._limit()
            self._ends.discard((before, count))
            self._known[before] = this_sum
            self._known.setdefault(this_sum.call.key, this_sum)
        self._count = count + 1

    def follow(self, call: str) -> None:
        """Notes a call that all workers have made."""
        self._before, self._num_sent = call, 0

    def forget(self) -> None:
        """Expects nothing more."""
        self._known.clear()
        self._ends.clear()
        self._count = 0
        self.follow("")

    def _limit(self) -> None:
        if len(self._known) + len(self._ends) >= _MOST:
            self._known.clear()
            self._ends.clear()


def part_of(flat: torch.Tensor) -> Part:
    """Describes a message."""
    return flat.numel(), flat.dtype

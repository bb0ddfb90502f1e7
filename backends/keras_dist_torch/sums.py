"""Large sums over workers that all of them expect, and so need no frame.

A large sum that follows the same call as last time is expected by all workers.
It needs a flag at its end only, by which a worker that wants something else
says so: it takes part with zeros, and then all compare what they want.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from keras_dist.plugin.recorder import Call

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
        self._before = ""
        self._num_sent = 0

    @property
    def expected(self) -> Sum | None:
        """The sum that all workers expect now, or `None`."""
        return self._known.get(self._before)

    def send_early(self, flat: torch.Tensor) -> Callable[[], None]:
        """Begins to sum the next early part of the expected sum."""
        self._num_sent += 1
        return self._start(flat)

    def give_up(self) -> None:
        """Takes part in the expected sum, if any, with zeros and the flag."""
        expected = self._known.pop(self._before, None)
        sent, self._num_sent = self._num_sent, 0
        if expected is None:
            return
        for size, dtype in expected.early[sent:]:
            self._start(torch.zeros(size, dtype=dtype, device=self._device))()
        size, dtype = expected.last
        flat = torch.zeros(size, dtype=dtype, device=self._device)
        flat[-1] = 1
        self._start(flat)()

    def agree(self, own: Sum, compare: Callable[[], None]) -> None:
        """Has all workers expect a sum, and compares it if they don't."""
        if self.expected == own:
            return
        before = self._before
        compare()
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[before] = own
        # Until something else is seen, it follows itself, as in `fit`.
        self._known.setdefault(own.call.key, own)

    def follow(self, call: str) -> None:
        """Notes a call that all workers have made."""
        self._before, self._num_sent = call, 0

    def forget(self) -> None:
        """Expects nothing more."""
        self._known.clear()
        self.follow("")


def part_of(flat: torch.Tensor) -> Part:
    """Describes a message."""
    return flat.numel(), flat.dtype

"""Throttles, which bound the number of steps under way at the same time."""

import contextlib
import threading
from collections.abc import Callable
from collections.abc import MutableSequence
from typing import Any

from jax.tree_util import tree_leaves


class Throttle:
    """The base class of throttles, which lets all steps be under way."""

    lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    waits = False  # programs give an array to wait for

    def record(self, call: str) -> None:
        """Notes a program that all workers are about to run together."""

    def drain(self, owner: object) -> None:
        """Waits until the next step may run; raises late errors of `owner`."""

    def dispatch(
        self,
        owner: object,
        kept: MutableSequence[Any],
        witness_of: Callable[[Any], Any],
        program: Callable[..., Any],
        *args: Any,
    ) -> None:
        """Runs a program of `owner`, and appends its result to `kept`."""
        # `extend` runs in C, so that no interrupt comes after a program has
        # deleted arguments and before its result is kept. Any one array of the
        # result shows that the program is done: they are ready together.
        kept.extend(map(program, *zip(args, strict=False)))
        if self.waits:
            self.enter(owner, witness_of(kept[-1]))

    def enter(self, owner: object, witness: object) -> None:
        """Notes a program that `owner` has just dispatched, to wait for it."""

    def leave(self, owner: object) -> None:
        """Waits for the owner's step; its errors are not raised."""

    def explain(self, error: Exception) -> BaseException:
        """Returns the error that caused that of a program, else the error."""
        return error

    def run(self, program: Callable[..., Any], *args: Any) -> Any:
        """Runs a program that deletes nothing; drops its late errors."""
        kept: list[Any] = []
        with self.lock:
            self.drain(None)
            self.dispatch(None, kept, any_of, program, *args)
        return kept[0]


def any_of(results: object) -> Any:
    """Returns one array of a program's results, or `None` without any."""
    leaves = tree_leaves(results)
    return leaves[0] if leaves else None


class OneAtATime(Throttle):
    """One step at a time on the CPU devices, for all strategies and threads."""

    # Devices of a CPU share a pool of threads, and each blocks one while it
    # waits for the others in a collective. Steps that are dispatched without
    # waiting use up the pool before all devices have arrived, and the runtime
    # aborts the process.

    waits = True

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._owner: object | None = None
        self._pending: Any = None

    def drain(self, owner: object) -> None:
        pending, by = self._pending, self._owner
        self._pending = self._owner = None
        if pending is None:
            return
        try:
            pending.block_until_ready()
        except Exception:
            if by is owner:
                raise

    def enter(self, owner: object, witness: object) -> None:
        self._owner, self._pending = owner, witness

    def leave(self, owner: object) -> None:
        with self.lock:
            if self._owner is owner:
                self.drain(self)

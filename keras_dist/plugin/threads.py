"""Replicas as threads of which one runs at a time.

Replica 0 runs in the caller's thread. A replica runs until it meets the
others or ends, then hands on to the next; the last to arrive holds the
meeting. So everything happens in one order, nothing needs a lock, and
replicas that diverge are found at once: nobody can run and somebody waits.
"""

import queue
import threading
import weakref
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

from keras_dist.plugin.replica import divergence


class _Aborted(BaseException):
    """Unwinds a replica because another one failed."""


class _Gate:
    """What one thread waits at until another opens it, time and again.

    An interrupt may come when a wait is over and not yet known to be. So
    turns are counted: waiting for one that has come already is over at once.
    """

    def __init__(self) -> None:
        self.turn = 0
        self._opened = 0
        self._wake = queue.SimpleQueue[None]()

    def open(self) -> None:
        self._opened += 1
        self._wake.put(None)

    def wait_for(self, turn: int) -> None:
        while self._opened < turn:
            self._wake.get()
        self.turn = turn


class Round:
    """One run of some replicas, from start to end.

    Args:
        num_replicas: Integer, how many take part.
    """

    def __init__(self, num_replicas: int) -> None:
        self._gates = [_Gate() for _ in range(num_replicas)]
        self._over = _Gate()
        self._active = set(range(num_replicas))
        self._waiting: dict[int, tuple[str, Any]] = {}
        self._hold: Callable[[list[Any]], Any] = list
        self._result: Any = None
        self.results: list[Any] = [None] * num_replicas
        self.error: BaseException | None = None

    def play(self, index: int, fn: Callable[[], Any]) -> None:
        """Runs one replica in this thread, until it ends."""
        try:
            if index:
                self._wait(self._gates[index])
            if self.error is None:
                self.results[index] = fn()
        except _Aborted:
            pass
        except BaseException as error:
            if self.error is None:
                error.add_note(
                    f"(on replica {index} of {len(self._gates)}, keras_dist)"
                )
                self.error = error
        self._active.discard(index)
        self._hand_on(index)

    def end(self) -> list[Any]:
        """Waits until every replica has ended; what they returned.

        Raises:
            BaseException: What the first replica to fail raised.
        """
        self._wait(self._over)
        results, error = self.results, self.error
        # Autograd nodes refer to this round: leave them no tensors to hold.
        self.results, self.error, self._result = [], None, None
        self._waiting, self._hold = {}, list
        if error is not None:
            raise error
        return results

    def meet(
        self,
        index: int,
        what: str,
        hold: Callable[[list[Any]], Any],
        value: Any,
    ) -> Any:
        """Waits for the others; returns `hold(values)`, held once."""
        if self.error is not None:
            raise _Aborted
        self._waiting[index] = (what, value)
        self._hold = hold
        self._hand_on(index)
        self._wait(self._gates[index])
        if self.error is not None:
            raise _Aborted
        return self._result

    def _wait(self, gate: _Gate) -> None:
        turn = 0
        while True:
            try:
                turn = turn or gate.turn + 1
                gate.wait_for(turn)
                return
            except BaseException as error:  # Ctrl-C, in the caller's thread
                # Another replica is running: let all of them unwind first.
                if self.error is None:
                    self.error = error

    def _hand_on(self, index: int) -> None:
        later = [i for i in self._active if i > index]
        if not later and self._waiting and self.error is None:
            try:
                self._hold_meeting()
            except BaseException as error:
                self.error = error
        following = min(later or self._active, default=None)
        (self._over if following is None else self._gates[following]).open()

    def _hold_meeting(self) -> None:
        arrived = self._waiting
        self._waiting = {}
        names = {what for what, _ in arrived.values()}
        if len(names) > 1 or len(arrived) < len(self._gates):
            places = [
                arrived.get(i, (None,))[0] for i in range(len(self._gates))
            ]
            raise divergence(places)
        values = [arrived[index][1] for index in sorted(arrived)]
        self._result = self._hold(values)


class Baton:
    """Threads that are kept between rounds, and end with this object.

    Args:
        enter: Callable without arguments, run in the caller's thread at the
            start of each round. It returns a callable that gives another
            thread the caller's thread-local state.
    """

    def __init__(self, enter: Callable[[], Callable[[], None]]) -> None:
        self._enter = enter
        self._workers: list[_Worker] = []
        # At exit too: threads that Python has to kill may abort the process.
        weakref.finalize(self, _end, self._workers)

    def run(self, round_: Round, fns: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs `fns` as replicas 0, 1, ...; returns what they returned.

        Raises:
            BaseException: What the first replica to fail raised, with a note
                that names it, once all the others have unwound.
        """
        inherit = self._enter()
        while len(self._workers) < len(fns) - 1:
            self._workers.append(_start(len(self._workers) + 1))
        for index, fn in enumerate(fns[1:], start=1):
            tasks, _ = self._workers[index - 1]
            tasks.put((round_, index, inherit, fn))
        round_.play(0, fns[0])
        return round_.end()


class BatonPool:
    """Batons, one for each depth of nesting.

    A function held in a meeting may run replicas again, while the threads of
    the round that it is part of wait.

    Args:
        enter: As for `Baton`.
    """

    def __init__(self, enter: Callable[[], Callable[[], None]]) -> None:
        self._enter = enter
        self._free: list[Baton] = []

    def run(self, round_: Round, fns: Sequence[Callable[[], Any]]) -> list[Any]:
        """As `Baton.run`, on threads that wait for nothing."""
        try:
            baton = self._free.pop()
        except IndexError:
            baton = Baton(self._enter)
        try:
            return baton.run(round_, fns)
        finally:
            self._free.append(baton)


_Queue = queue.SimpleQueue[Any]
_Worker = tuple[_Queue, threading.Thread]


def _start(number: int) -> _Worker:
    tasks = _Queue()
    name = f"keras_dist-replica-{number}"
    thread = threading.Thread(
        target=_work, args=(tasks,), name=name, daemon=True
    )
    thread.start()
    return tasks, thread


def _end(workers: list[_Worker]) -> None:
    for tasks, _ in workers:
        tasks.put(None)
    for _, thread in workers:
        if thread is not threading.current_thread():
            thread.join(timeout=5)


def _work(tasks: _Queue) -> None:
    while (task := tasks.get()) is not None:
        round_, index, inherit, fn = task

        def replica(
            inherit: Callable[[], None] = inherit, fn: Callable[[], Any] = fn
        ) -> Any:
            inherit()
            return fn()

        round_.play(index, replica)
        # Nothing of a finished step stays alive while this thread waits.
        del task, round_, inherit, fn, replica

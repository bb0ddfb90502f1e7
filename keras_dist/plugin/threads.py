"""Replica threads, of which one runs at a time.

Replica 0 runs in the caller's thread. A replica runs until it meets the others
or ends, then lets the next one run; the last to arrive runs the rendezvous'
function. So everything happens in one order and needs no lock. Replicas that
diverge are found at once: the rendezvous is incomplete although no replica can
run.
"""

import queue
import threading
import weakref
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

from keras_dist.plugin.replica import divergence


class _Aborted(BaseException):
    """The exception that unwinds a replica after another one failed."""


class _Gate:
    """A gate for one thread, which another opens once for each turn. Turns
    are counted, since an interrupt may hide that a wait has ended."""

    def __init__(self) -> None:
        self.turn = 0
        self.opened = 0
        self.wake = queue.SimpleQueue[None]()


class Round:
    """One run of several replicas, from start to end.

    Args:
        num_replicas: Integer, number of replicas.
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
        """Runs one replica in this thread, until it ends.

        Args:
            index: Integer, the replica.
            fn: Callable without arguments. An error of it is raised by `end`.
        """
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
        """Waits until every replica has ended, and returns their results.

        Returns:
            List of the results, replica 0 first.

        Raises:
            BaseException: The error of the first replica that failed.
        """
        self._wait(self._over)
        results, error = self.results, self.error
        # Autograd nodes may outlive the round and refer to it: free its
        # tensors.
        self.results, self.error, self._result = [], None, None
        self._waiting, self._hold = {}, list
        if error is not None:
            raise error
        return results

    def rendezvous(
        self,
        index: int,
        what: str,
        hold: Callable[[list[Any]], Any],
        value: object,
    ) -> Any:
        """Waits for the other replicas; returns `hold(values)`, called once.

        Args:
            index: Integer, the replica that this thread runs.
            what: String that names the rendezvous in errors.
            hold: Callable, given the list of the replicas' values.
            value: This replica's value, which may be anything.

        Returns:
            The result of `hold`, the same on each replica.
        """
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
                while gate.opened < turn:
                    gate.wake.get()
                gate.turn = turn
                return
            except BaseException as error:  # Ctrl-C, in the caller's thread
                # Another replica is running: all of them have to unwind first.
                if self.error is None:
                    self.error = error

    def _hand_on(self, index: int) -> None:
        last = max(self._active, default=-1)
        if last <= index and self._waiting and self.error is None:
            try:
                self._hold_rendezvous()
            except BaseException as error:
                self.error = error
        if last > index:
            following = index + 1
            while following not in self._active:
                following += 1
            gate = self._gates[following]
        elif self._active:
            gate = self._gates[min(self._active)]
        else:
            gate = self._over
        gate.opened += 1
        gate.wake.put(None)

    def _hold_rendezvous(self) -> None:
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


class LockstepThreads:
    """A pool of replica threads for nested rounds.

    A function that runs at a rendezvous may run replicas again while the
    threads of the outer round wait.

    Args:
        enter: Callable without arguments, run in the caller's thread at the
            start of each round. It returns a callable that gives another thread
            the caller's thread-local state.
    """

    def __init__(self, enter: Callable[[], Callable[[], None]]) -> None:
        self._enter = enter
        self._free: list[list[_Worker]] = []
        self._all: list[_Worker] = []
        # Also at exit: threads still alive then may abort the process.
        weakref.finalize(self, _end, self._all)

    def run(self, round_: Round, fns: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs `fns` as replicas 0, 1, ... on threads of no other round.

        Args:
            round_: A new `Round` for as many replicas.
            fns: Sequence of callables without arguments.

        Returns:
            List of their results.

        Raises:
            BaseException: The error of the first replica that failed, with a
                note that names the replica, once all the others have unwound.
        """
        try:
            workers = self._free.pop()
        except IndexError:
            workers = []
        try:
            inherit = self._enter()
            while len(workers) < len(fns) - 1:
                worker = _start(len(workers) + 1)
                self._all.append(worker)
                workers.append(worker)
            for index, fn in enumerate(fns[1:], start=1):
                tasks, _ = workers[index - 1]
                tasks.put((round_, index, inherit, fn))
            round_.play(0, fns[0])
            return round_.end()
        finally:
            self._free.append(workers)


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
        # Keep no reference to a finished step while this thread waits.
        del task, round_, inherit, fn, replica

"""A group: all processes that were started together."""

import selectors
import signal
import time
from collections.abc import Callable
from collections.abc import Sequence

from keras_dist.launch.failures import Failure
from keras_dist.launch.failures import first
from keras_dist.launch.member import Command
from keras_dist.launch.member import Member
from keras_dist.launch.orphans import Watcher
from keras_dist.launch.orphans import watching
from keras_dist.launch.output import Screen

# Seconds to wait for the cause when a worker says that it lost another one.
SETTLING_TIME = 2.0

# Seconds between checks for processes that have ended.
TURN = 0.05


class ProcessGroup:
    """The workers of this machine, and the coordinator if there is one."""

    def __init__(
        self,
        workers: Sequence[Command],
        coordinator: Command | None,
        screen: Screen,
        grace: float,
        on_failure: Callable[[Failure], bool],
    ) -> None:
        self.failure: Failure | None = None
        self._programs = workers
        self._coordinator_program = coordinator
        self._screen = screen
        self._grace = grace
        self._on_failure = on_failure
        self._workers: list[Member] = []
        self._coordinator: Member | None = None
        self._signals: list[int] = []
        self._deadline: float | None = None

    def run(self, timeout: float | None = None) -> Failure | None:
        """Starts all processes, waits for the workers, and ends what is left.

        Returns the failure that came first, if any; raises `TimeoutError`.
        """
        with selectors.DefaultSelector() as selector, watching() as watcher:
            self._selector = selector
            try:
                self._start(watcher)
                self._wait(timeout)
            finally:
                self._end()
        return self.failure

    def stop(self, number: int) -> None:
        """Sends a signal to all workers, and SIGKILL after the grace time."""
        self._signals.append(number)
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace
        for worker in self._workers:
            if number == signal.SIGINT:
                worker.interrupt()
            else:
                worker.signal(number)

    def kill(self) -> None:
        """Kills all workers, and all that they started, at once."""
        self._signals.append(signal.SIGKILL)
        for worker in self._workers:
            worker.kill()

    def _start(self, watcher: Watcher) -> None:
        def start(program: Command) -> Member:
            return Member(program, self._selector, watcher, self._grace)

        if self._coordinator_program is not None:
            self._coordinator = start(self._coordinator_program)
        for program in self._programs:
            self._workers.append(start(program))
            # Workers that had been started when a signal came have it already.
            for number in tuple(self._signals):
                self._workers[-1].signal(number)

    def _wait(self, timeout: float | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while self._running():
            self._turn()
            self._decide()
            running = self._running()
            is_late = end is not None and time.monotonic() > end
            if running and is_late and not self._signals:
                names = ", ".join(m.program.name for m in running)
                raise TimeoutError(
                    f"Not done after {timeout} seconds: {names}. All workers "
                    "were ended. Pass a longer `timeout`, or look for one "
                    "that waits for another."
                )

    def _running(self) -> list[Member]:
        return [m for m in self._workers if m.status is None]

    def _turn(self) -> None:
        for key, _ in self._selector.select(TURN):
            key.data()
        now = time.monotonic()
        for member in self._members():
            member.poll(now)
            if not self._signals and member.failure is not None:
                # Output from here on is shown after the report.
                self._screen.hold()
        if self._deadline is not None and now > self._deadline:
            for worker in self._workers:
                worker.kill()

    def _members(self) -> list[Member]:
        coordinator = [] if self._coordinator is None else [self._coordinator]
        return [*self._workers, *coordinator]

    def _decide(self) -> None:
        """Ends all workers when one has failed, once it is clear which one."""
        if self._signals:
            return
        failures = [m.failure for m in self._workers if m.failure is not None]
        service = self._coordinator
        if service and service.status is not None and self._running():
            # It should not end before the workers do.
            failures.append(service.ending())
        cause = first(failures)
        if cause is None:
            return
        since = min(failure.time for failure in failures)
        settled = time.monotonic() > since + SETTLING_TIME
        if cause.lost_a_peer and self._running():
            # A worker that still runs may be about to end with the cause, and
            # only a part of its traceback may be there.
            if not settled:
                return
            cause = self._blamed_by(cause) or cause
        self.failure = cause
        if self._on_failure(cause):
            for member in self._members():
                if member.program.name == cause.name:
                    member.forget_traceback()
        self._screen.release()
        self.stop(signal.SIGTERM)

    def _blamed_by(self, cause: Failure) -> Failure | None:
        """Returns the failure of a running worker that others lost, if any."""
        running = {m.program.name: m for m in self._running()}
        failure, name = None, cause.blamed
        while name in running:
            failure = running.pop(name).lost(cause)
            name = failure.blamed
        return failure

    def _end(self) -> None:
        """Ends all processes that still run: by SIGTERM, then by SIGKILL."""
        try:
            if self._running() and not self._signals:
                self.stop(signal.SIGTERM)
            while not all(worker.gone for worker in self._workers):
                self._turn()
            if self._coordinator is not None:
                self._coordinator.signal(signal.SIGTERM)
                deadline = time.monotonic() + self._grace
                while not self._coordinator.gone:
                    if (
                        signal.SIGKILL in self._signals
                        or time.monotonic() > deadline
                    ):
                        self._coordinator.kill()
                    self._turn()
        finally:
            self._screen.release()
            for member in self._members():
                member.close()

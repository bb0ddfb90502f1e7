"""One process of a group, with all that it starts."""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from keras_dist.launch.failures import TRACEBACK
from keras_dist.launch.failures import Failure
from keras_dist.launch.failures import last_lines
from keras_dist.launch.orphans import PROGRAM
from keras_dist.launch.orphans import Watcher
from keras_dist.launch.output import Pipe
from keras_dist.launch.output import Sink
from keras_dist.launch.output import Tail
from keras_dist.launch.tracebacks import TracebackSink

# Seconds that killed processes have to leave their group.
REAPING_TIME = 1.0


@dataclass(frozen=True)
class Command:
    """One process to start."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    stdout: tuple[Sink, ...] = ()
    stderr: tuple[Sink, ...] = ()
    log: Path | None = None
    joined: Path | None = None  # it must make this file when it has joined


class Member:
    """A running process, in a session of its own.

    A terminal's Ctrl-C reaches the launcher alone, and all that the process
    has started can be ended with it.
    """

    def __init__(
        self,
        program: Command,
        selector: selectors.BaseSelector,
        watcher: Watcher,
        grace: float,
    ) -> None:
        self.program = program
        self.status: int | None = None
        self.gone = False
        self._ended_at = 0.0
        self._killed_at: float | None = None
        self._watcher = watcher
        self._grace = grace
        self._tail = Tail()
        self._shown = [TracebackSink(sink) for sink in program.stderr]
        self._is_interrupted = False
        logs: list[Sink] = []
        if program.log is not None:
            logs = [open(program.log, "wb", buffering=0)]  # noqa: SIM115
        self._process = subprocess.Popen(
            [*PROGRAM, str(os.getpid()), *program.command],
            env=program.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        watcher.add(self._process.pid)
        out, err = self._process.stdout, self._process.stderr
        assert out is not None and err is not None
        self._pipes = [
            Pipe(out, selector, (*program.stdout, *logs)),
            Pipe(err, selector, (*self._shown, *logs, self._tail)),
        ]

    @property
    def failure(self) -> Failure | None:
        """The failure, or `None` if the process runs or ended well."""
        return self.ending() if self.status or self._stayed_alone else None

    def ending(self) -> Failure:
        return Failure(
            self.program.name,
            self.status or 0,
            self._ended_at,
            self._tail.text,
            self.program.log,
            self._stayed_alone,
        )

    def lost(self, told_by: Failure) -> Failure:
        """Returns the failure of a running process, as another one tells it."""
        text = self._tail.text
        status = 1 if TRACEBACK in text else told_by.status
        return Failure(
            self.program.name,
            status,
            told_by.time,
            text,
            self.program.log,
            told_by=told_by,
        )

    @property
    def _stayed_alone(self) -> bool:
        """True if the process ended well and never joined the other workers."""
        joined = self.program.joined
        return self.status == 0 and joined is not None and not joined.exists()

    def signal(self, number: int) -> None:
        """Sends a signal to the process, if it runs."""
        # Not to its helpers, which it may need to save its state.
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def interrupt(self) -> None:
        """Sends SIGINT, after which a traceback of it is not shown."""
        self._is_interrupted = True
        self.signal(signal.SIGINT)

    def forget_traceback(self) -> None:
        """Leaves the last traceback to another one, who shows it."""
        for sink in self._shown:
            sink.drop(last_lines(self._tail.text))

    def show_tracebacks(self) -> None:
        """Shows what was kept back, now that no report is to come."""
        for sink in self._shown:
            sink.finish()

    def kill(self) -> None:
        """Kills the process, and all that it started, at once."""
        if not self.gone:
            self._signal_group(signal.SIGKILL)
            self._killed_at = self._killed_at or time.monotonic()

    def poll(self, now: float) -> None:
        """Notices the end of the process, and then ends what it left behind."""
        if self.gone:
            return
        if self.status is None:
            status = self._process.poll()
            if status is None:
                if not self._is_interrupted:
                    for sink in self._shown:
                        sink.show_late(now)
                return
            self.status, self._ended_at = status, now
            # Reads its last output before the failure is judged.
            for pipe in self._pipes:
                pipe.drain()
            if self._is_interrupted and self._tail.text.rstrip().endswith(
                KeyboardInterrupt.__name__
            ):
                self.forget_traceback()
            self._signal_group(signal.SIGTERM)
        if self._is_empty(now):
            self.gone = True
            self._watcher.remove(self._process.pid)
            for pipe in self._pipes:
                pipe.close()
            if self.status == 0:
                self.show_tracebacks()
        elif now > self._ended_at + self._grace:
            self.kill()

    def close(self) -> None:
        """Kills the process and its group, and waits until they are gone."""
        while not self.gone:
            self.kill()
            self._process.wait()
            # Killed processes take a moment to leave the group.
            time.sleep(0.001)
            self.poll(time.monotonic())
        self.show_tracebacks()

    def _signal_group(self, number: int) -> bool:
        """Sends a signal to the process group; returns false if it is empty."""
        # The number is not given out again while the group has a member.
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def _is_empty(self, now: float) -> bool:
        """Returns true if nothing is left that the process had started."""
        # The first process of a container inherits orphans, and has to wait for
        # them.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-self._process.pid, os.WNOHANG)
        if not self._signal_group(0):
            return True
        # Dead processes stay in the group if the system's first process does
        # not wait for them.
        return self._killed_at is not None and (
            now > self._killed_at + REAPING_TIME
        )

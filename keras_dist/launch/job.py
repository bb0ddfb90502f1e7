"""A job: a command for several workers, and restarts when one fails."""

import functools
import signal
from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from keras_dist.environment.machine import VISIBLE
from keras_dist.environment.machine import gpus
from keras_dist.environment.machine import share
from keras_dist.launch import coordinator
from keras_dist.launch.addresses import Addresses
from keras_dist.launch.addresses import AddressLayout
from keras_dist.launch.failures import Failure
from keras_dist.launch.group import ProcessGroup
from keras_dist.launch.member import Command
from keras_dist.launch.output import Screen
from keras_dist.launch.output import Sink
from keras_dist.launch.output import on_screen

GRACE = 10.0

# Environment variables that some workers have.
COORDINATOR = "KERAS_DIST_COORDINATOR"
JOB = "KERAS_DIST_JOB"
JOINED = "KERAS_DIST_JOINED_FILE"

# Signals to the launcher that its workers get.
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Job:
    """A command to run on all workers."""

    command: tuple[str, ...]
    layout: AddressLayout
    backend: str
    environment: Mapping[str, str]
    devices: int | None = None  # virtual CPU devices of each worker
    log_dir: Path | None = None  # if not, output goes to the screen
    max_restarts: int = 0
    grace: float = GRACE  # seconds between SIGTERM and SIGKILL
    # A folder where each worker notes that it has joined, if it must.
    joined: Path | None = None

    def group(
        self,
        addresses: Addresses,
        restarts: int,
        screen: Screen,
        on_failure: Callable[[Failure], bool],
    ) -> ProcessGroup:
        """Returns the processes of this machine, not started yet."""
        service = coordinator.find(self.backend)
        workers = [
            self._worker(index, addresses, bool(service), restarts, screen)
            for index in self.layout.local
        ]
        serving = None
        if service and self.layout.host_index == 0:
            serving = self._coordinator(addresses, restarts)
        return ProcessGroup(workers, serving, screen, self.grace, on_failure)

    def _worker(
        self,
        index: int,
        addresses: Addresses,
        has_coordinator: bool,
        restarts: int,
        screen: Screen,
    ) -> Command:
        # Other launchers' variables stay: strategies look for these first.
        environment = {
            **self.environment,
            "KERAS_DIST_WORKERS": ",".join(addresses.workers),
            "KERAS_DIST_WORKER_INDEX": str(index),
            "KERAS_DIST_RESTARTS": str(restarts),
            JOB: addresses.job,
            # Lines are shown when they are written, not when a buffer is full.
            "PYTHONUNBUFFERED": "1",
        }
        for variable in (COORDINATOR, JOINED):
            environment.pop(variable, None)
        if has_coordinator:
            environment[COORDINATOR] = addresses.coordinator
        joined = None
        if self.joined is not None and self.layout.num_workers > 1:
            joined = self.joined / f"{restarts}-{index}"
            environment[JOINED] = str(joined)
        if self.devices is not None:
            environment["KERAS_DIST_VIRTUAL_DEVICES"] = str(self.devices)
        if self._gpus[index]:
            environment[VISIBLE] = ",".join(self._gpus[index])
        name = f"worker {index}"
        stdout: tuple[Sink, ...] = ()
        stderr: tuple[Sink, ...] = ()
        if self.log_dir is None or index == 0:
            stdout = (on_screen(screen, "stdout", name, index == 0),)
            stderr = (on_screen(screen, "stderr", name, index == 0),)
        log = self._log(f"worker-{index}", restarts)
        return Command(
            name, self.command, environment, stdout, stderr, log, joined
        )

    @functools.cached_property
    def _gpus(self) -> dict[int, list[str]]:
        """The GPUs of each worker of this machine, by the worker's index."""
        local = self.layout.local
        if len(local) == 1:
            return {local[0]: []}
        names = gpus(self.environment)
        return {
            index: share(names, position, len(local))
            for position, index in enumerate(local)
        }

    def _coordinator(self, addresses: Addresses, restarts: int) -> Command:
        command = coordinator.command(
            self.backend, addresses.coordinator, self.layout.num_workers
        )
        log = self._log("coordinator", restarts)
        environment = {**self.environment, JOB: addresses.job}
        return Command("the coordinator", command, environment, log=log)

    def _log(self, name: str, restarts: int) -> Path | None:
        if self.log_dir is None:
            return None
        again = f".restart-{restarts}" if restarts else ""
        return self.log_dir / f"{name}{again}.log"


class Signals:
    """A context in which the launcher's signals go to the workers.

    A second Ctrl-C kills them at once.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self.group: ProcessGroup | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Signals":
        for number in PASSED_ON:
            # SIGHUP under `nohup` stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        again = number == signal.SIGINT and number in self.received
        self.received.append(number)
        if self.group is None:
            return
        if again:
            self.group.kill()
        else:
            self.group.stop(number)


def run_job(job: Job, screen: Screen) -> int:
    """Runs a job to its end, with restarts, and returns the exit status."""

    def report(failure: Failure) -> bool:
        screen.say(failure.report())
        return failure.has_traceback

    addresses = job.layout.addresses()
    restarts = 0
    with Signals() as signals:
        while True:
            group = job.group(addresses, restarts, screen, report)
            signals.group = group
            failure = None if signals.received else group.run()
            if signals.received:
                if signals.received[0] == signal.SIGINT:
                    screen.say("interrupted")
                return 128 + signals.received[0]
            if failure is None:
                return 0
            # A script that did not join once will not join the next time.
            if restarts == job.max_restarts or failure.stayed_alone:
                if restarts and not failure.stayed_alone:
                    screen.say(f"no restart is left: all {restarts} were used")
                return failure.exit_status
            restarts += 1
            screen.say(
                f"starting all workers again (restart {restarts} of "
                f"{job.max_restarts}), because {failure.name} {failure.how()}"
            )
            addresses = job.layout.addresses(avoid=addresses.all)

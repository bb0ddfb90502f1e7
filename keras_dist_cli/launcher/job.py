"""A job: what to run on how many workers, and what to do when one fails."""

import sys
from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from keras_dist_cli.launcher import coordinator
from keras_dist_cli.launcher.addresses import Addresses
from keras_dist_cli.launcher.addresses import Layout
from keras_dist_cli.launcher.environment import worker_environment
from keras_dist_cli.launcher.failures import Failure
from keras_dist_cli.launcher.gpus import gpus
from keras_dist_cli.launcher.gpus import share
from keras_dist_cli.launcher.group import Group
from keras_dist_cli.launcher.member import Program
from keras_dist_cli.launcher.output import Screen
from keras_dist_cli.launcher.output import Sink
from keras_dist_cli.launcher.output import on_screen
from keras_dist_cli.launcher.signals import Signals

GRACE = 10.0


@dataclass(frozen=True)
class Job:
    """What to run.

    Args:
        command: Tuple of strings, what each worker runs, the first a path.
        layout: Which workers there are, and which are started here.
        backend: String, a backend's name, for its coordinator.
        environment: Environment variables that workers get beside ours.
        devices: Integer, virtual CPU devices of a worker, or `None`.
        log_dir: Path of a folder for what workers write, or `None` for the
            screen.
        max_restarts: Integer, how often all workers are started again.
        grace: Float, seconds between SIGTERM and SIGKILL.
        joined: Path of a folder where workers note that they have joined the
            others, which each must; `None` if they need not.
    """

    command: tuple[str, ...]
    layout: Layout
    backend: str
    environment: Mapping[str, str]
    devices: int | None = None
    log_dir: Path | None = None
    max_restarts: int = 0
    grace: float = GRACE
    joined: Path | None = None

    def group(
        self,
        addresses: Addresses,
        restarts: int,
        screen: Screen,
        on_failure: Callable[[Failure], None],
    ) -> Group:
        """The processes of this machine, not started yet.

        Args:
            addresses: Where all processes listen.
            restarts: Integer, how often they were started before.
            screen: The `Screen`.
            on_failure: Called with the first `Failure`.
        """
        service = coordinator.find(self.backend)
        workers = [
            self._worker(index, addresses, bool(service), restarts, screen)
            for index in self.layout.local
        ]
        serving = None
        if service and self.layout.host_index == 0:
            serving = self._coordinator(addresses, restarts)
        return Group(workers, serving, screen, self.grace, on_failure)

    def _worker(
        self,
        index: int,
        addresses: Addresses,
        has_coordinator: bool,
        restarts: int,
        screen: Screen,
    ) -> Program:
        name = f"worker {index}"
        stdout: tuple[Sink, ...] = ()
        stderr: tuple[Sink, ...] = ()
        if self.log_dir is None or index == 0:
            stdout = (on_screen(screen, "stdout", name, index == 0),)
            stderr = (on_screen(screen, "stderr", name, index == 0),)
        joined = None
        if self.joined is not None and self.layout.num_workers > 1:
            joined = self.joined / f"{restarts}-{index}"
        environment = worker_environment(
            self.environment,
            index,
            addresses,
            has_coordinator,
            restarts,
            self.devices,
            self._own_gpus(index),
            joined,
        )
        log = self._log(f"worker-{index}", restarts)
        return Program(
            name, self.command, environment, stdout, stderr, log, joined
        )

    def _own_gpus(self, index: int) -> list[str]:
        local = list(self.layout.local)
        if len(local) == 1:
            return []
        position = local.index(index)
        return share(gpus(self.environment), position, len(local))

    def _coordinator(self, addresses: Addresses, restarts: int) -> Program:
        command = coordinator.command(
            self.backend, addresses.coordinator, self.layout.num_workers
        )
        log = self._log("coordinator", restarts)
        return Program("the coordinator", command, self.environment, log=log)

    def _log(self, name: str, restarts: int) -> Path | None:
        if self.log_dir is None:
            return None
        again = f".restart-{restarts}" if restarts else ""
        return self.log_dir / f"{name}{again}.log"


def python(*arguments: str) -> tuple[str, ...]:
    """A command for this Python."""
    return (sys.executable, *arguments)


def run_job(job: Job, screen: Screen) -> int:
    """Runs a job to its end, with restarts.

    Args:
        job: The `Job`.
        screen: Where to show what happens.

    Returns:
        The exit status: 0; that of the worker that failed first; or 128 and
        the number of the signal that ended it, or the launcher.
    """

    def report(failure: Failure) -> None:
        screen.say(failure.report())

    addresses = job.layout.addresses()
    restarts = 0
    with Signals() as signals:
        while True:
            group = job.group(addresses, restarts, screen, report)
            signals.group = group
            failure = None if signals.received else group.run()
            if signals.received:
                return 128 + signals.received[0]
            if failure is None:
                return 0
            # A script that did not join will not the next time either.
            if restarts == job.max_restarts or failure.stayed_alone:
                if restarts and not failure.stayed_alone:
                    screen.say(f"no restart is left of {restarts}")
                return failure.exit_status
            restarts += 1
            screen.say(
                f"starting all workers again (restart {restarts} of "
                f"{job.max_restarts}), because {failure.name} {failure.how()}"
            )
            addresses = job.layout.addresses(avoid=addresses.all)

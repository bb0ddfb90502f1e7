"""Failures of processes, and the choice of the one that came first."""

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from keras_dist.errors import RESTART_EXIT_CODE

# Lines that a report shows at most.
LONGEST_TRACEBACK = 100
WITHOUT_TRACEBACK = 20

TRACEBACK = "Traceback (most recent call last):"

CHAINED = re.compile(
    r"\n(During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception)"
    r":\n\s*$"
)

STAYED_ALONE = (
    "If it trained a model, it did so alone. Expected: each worker makes a "
    "`keras_dist.MultiWorkerMirroredStrategy()`, and its model in that "
    "strategy's scope. If workers are not to train together, say so with "
    "`keras-dist run --independent`."
)

LOST_A_PEER = re.compile(r"^([\w.]+\.)?WorkerLostError\b", re.MULTILINE)

# Another worker in the error's message. The worker that raises it is
# capitalized: "Worker 0".
ANOTHER = re.compile(r"\bworker \d+\b")


@dataclass(frozen=True)
class Failure:
    """The failure of one process."""

    name: str
    status: int  # minus the signal's number, if one killed it
    time: float = 0.0  # of `time.monotonic`, when it was noticed
    stderr: str = ""  # the end of it
    log: Path | None = None  # a file with all output
    # It ended well without having joined the other workers.
    stayed_alone: bool = False
    # The failure of a worker that lost this one, which still runs.
    told_by: "Failure | None" = None

    @property
    def lost_a_peer(self) -> bool:
        """True if the process failed because it lost another one."""
        return self.status == RESTART_EXIT_CODE or bool(
            LOST_A_PEER.search(last_lines(self.stderr))
        )

    @property
    def has_traceback(self) -> bool:
        return TRACEBACK in self.stderr

    @property
    def blamed(self) -> str | None:
        """The name of the worker that this one says it lost, or `None`."""
        output = last_lines(self.stderr)
        lost = LOST_A_PEER.search(output)
        names = ANOTHER.findall(output, lost.end()) if lost else []
        return next((name for name in names if name != self.name), None)

    @property
    def exit_status(self) -> int:
        """The status that a shell would give, never 0."""
        return 128 - self.status if self.status < 0 else self.status or 1

    def how(self) -> str:
        """Returns the failure as a phrase without a subject."""
        if self.told_by is not None:
            said = "failed" if self.has_traceback else "did not answer"
            return f"{said}, and still ran when {self.told_by.name} noticed"
        if self.stayed_alone:
            return "ended without having joined the other workers"
        if self.status == RESTART_EXIT_CODE:
            return (
                f"ended with exit status {RESTART_EXIT_CODE}, which asks for "
                "a restart: it saved its state, or lost another worker"
            )
        if self.status == -signal.SIGKILL:
            return (
                "was ended by the signal SIGKILL (9), which the system sends "
                "when memory runs out"
            )
        if self.status < 0:
            return f"was ended by the signal {signal_name(-self.status)}"
        return f"ended with exit status {self.status}"

    def report(self) -> str:
        """Returns a message with the failure and the last lines of stderr."""
        if self.stayed_alone:
            return f"{self.name} {self.how()}. {STAYED_ALONE}"
        lines = [f"{self.name} failed first: it {self.how()}"]
        output = last_lines(self.stderr)
        if self.told_by is not None and not self.has_traceback:
            lines.append(f"{self.told_by.name} says:")
            output = last_lines(self.told_by.stderr)
        if output:
            lines += [f"  {line}" for line in output.splitlines()]
        else:
            lines.append("It wrote nothing to stderr.")
        if self.log is not None:
            lines.append(f"Its whole output is in {self.log}")
        return "\n".join(lines)


def first(failures: Iterable[Failure]) -> Failure | None:
    """Returns the failure that most likely caused the others."""
    # An exit status may be a consequence of a signal noticed with it.
    return min(
        failures,
        key=lambda f: (f.lost_a_peer, f.time, f.stayed_alone, f.status > 0),
        default=None,
    )


def last_lines(stderr: str) -> str:
    """Returns the last traceback with its causes, or else the last lines."""
    text = stderr.rstrip()
    start = text.rfind(TRACEBACK)
    if start < 0:
        return "\n".join(text.splitlines()[-WITHOUT_TRACEBACK:])
    while CHAINED.search(text[:start]) and text.rfind(TRACEBACK, 0, start) >= 0:
        start = text.rfind(TRACEBACK, 0, start)
    lines = text[start:].splitlines()
    if len(lines) <= LONGEST_TRACEBACK:
        return "\n".join(lines)
    # The first half tells where it began, the last what was wrong.
    half = LONGEST_TRACEBACK // 2
    left_out = f"  ... {len(lines) - 2 * half} lines left out ..."
    return "\n".join([*lines[:half], left_out, *lines[-half:]])


def signal_name(number: int) -> str:
    """Returns a signal's name and number, such as `"SIGTERM (15)"`."""
    try:
        return f"{signal.Signals(number).name} ({number})"
    except ValueError:
        return str(number)

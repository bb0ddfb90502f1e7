"""Trials of a backend: rows to try, run even if its process ends or hangs."""

import dataclasses
import enum
import time
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any

from rich.status import Status as RichStatus
from rich.text import Text

from keras_dist.cli.child import Child
from keras_dist.cli.child import ChildError
from keras_dist.cli.environment import CPU_ONLY
from keras_dist.environment.packages import InstalledBackend
from keras_dist.planning import tables

# The model that is trained unless the user names another one.
OWN_MODEL = "keras_dist.cli.jobs.digits:make"
# What replicas may keep in parts, and the kind of the strategy.
_SHARDED = {"optimizer": "sharded", "variables": "variables"}


class RowPlace(enum.Enum):
    """The devices that the process of a row sees."""

    CPU = "cpu"
    ACCELERATORS = "accelerators"


CPU = RowPlace.CPU


class Status(enum.StrEnum):
    """The status of a row that was tried or skipped."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Row:
    """One trial of a backend; without a job, it is skipped."""

    name: str
    place: RowPlace = RowPlace.CPU
    job: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""  # why it is skipped
    fix: str = ""  # what to do about it


@dataclass(frozen=True)
class RowResult:
    """The result of one row."""

    backend: str
    name: str
    status: Status
    details: str  # a finding or a reason
    fix: str = ""
    seconds: float = 0.0
    last_lines: str = ""  # of the process, or of the report
    report: dict[str, Any] | None = None  # of `strategy.verify`


@dataclass(frozen=True)
class Settings:
    """The options of `keras-dist test`."""

    workers: int = 0
    devices: int = 4  # at the most, virtual ones
    timeout: float = 90.0  # in seconds, for each row
    model: str = OWN_MODEL


def rows_for(
    backend: InstalledBackend, seen: Mapping[str, Any], settings: Settings
) -> list[Row]:
    """Returns the rows to try with a backend, from its first answer."""
    accelerators = [d for d in seen["devices"] if not d.startswith("cpu:")]
    model = settings.model
    cpus = [f"cpu:{index}" for index in range(settings.devices)]
    two = cpus[:2]

    def training(
        name: str, kind: str, devices: Sequence[str], where: RowPlace = CPU
    ) -> Row:
        arguments = {"model": model, "kind": kind, "devices": devices}
        name = f"{name}, {tables.names_text(devices)}"
        return Row(name, where, "verify", arguments)

    rows = [training("one device", "one", cpus[:1])]
    rows += [
        training("mirrored", "mirrored", cpus[:count])
        for count in sorted({len(two), len(cpus)} - {1})
    ]
    rows.append(training("central storage", "central", two))
    for name, kind in _SHARDED.items():
        if seen[f"shards_{name}"]:
            rows.append(training(f"sharded {name}", kind, two))
            continue
        reason = f"{backend.name} keeps it mirrored"
        fix = "use another backend if you need it sharded"
        rows.append(Row(f"sharded {name}", reason=reason, fix=fix))
    several = {"run, reduce, gather": (two, CPU)}
    if accelerators:
        place = RowPlace.ACCELERATORS
        rows.append(training("mirrored", "mirrored", accelerators, place))
        name = f"run, reduce, gather, {tables.names_text(accelerators)}"
        several[name] = (accelerators, place)
    else:
        reason = "the backend sees no accelerator"
        fix = "if this machine has one, install the framework for it"
        rows.append(Row("accelerators", reason=reason, fix=fix))
    if model == OWN_MODEL:
        rows += [
            Row(name, place, "collectives", {"devices": devices})
            for name, (devices, place) in several.items()
        ]
    return [*rows, *_over_workers(len(accelerators), settings)]


def _over_workers(num_accelerators: int, settings: Settings) -> list[Row]:
    count, model = settings.workers, settings.model
    if not count:
        return [Row("workers", reason="not asked for", fix="--workers 2")]
    arguments = {
        "model": model,
        "workers": count,
        "devices": 1,
        # Shorter than the row's limit, so that the process can end its
        # workers before it is killed.
        "timeout": max(1.0, settings.timeout - 5.0),
    }
    rows = [Row(f"{count} workers", CPU, "verify workers", arguments)]
    divide = num_accelerators >= count and num_accelerators % count == 0
    if divide and model == OWN_MODEL:
        name = f"{count} workers, all accelerators"
        given = arguments | {"devices": None}
        rows.append(Row(name, RowPlace.ACCELERATORS, "verify workers", given))
    return rows


STARTS = "starts"
REPORT = (
    "this should not happen: report it, with the output of `keras-dist info`"
)
LONGER = "try a longer --timeout; if it never ends, report it"
# Each framework has its own variable for products in full precision.
_EXACT = {
    "NVIDIA_TF32_OVERRIDE": "0",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
}


class CommandTrial:
    """Runs the rows of one backend, in a new process after one that failed."""

    def __init__(
        self,
        backend: InstalledBackend,
        settings: Settings,
        progress: RichStatus,
        results: list[RowResult],
    ) -> None:
        self._backend = backend
        self._settings = settings
        self._progress = progress
        self._results = results
        self._child: Child | None = None
        self._place = RowPlace.ACCELERATORS
        self._has_accelerators = False

    def run(self) -> dict[str, Any] | None:
        """Runs all rows; returns what the backend sees, or `None`."""
        if not self._backend.is_installed:
            fix = self._backend.fix
            self._end(STARTS, Status.SKIPPED, "not installed", fix)
            return None
        self._progress.update(f"{self._backend.name}: {STARTS}")
        try:
            return self._run()
        finally:
            self._close()

    def _run(self) -> dict[str, Any] | None:
        start = time.monotonic()
        try:
            seen = self._start(RowPlace.ACCELERATORS)
        except ChildError as error:
            self._end_failed(STARTS, start, error, self._backend.repair)
            return None
        rows = rows_for(self._backend, seen, self._settings)
        self._has_accelerators = any(
            row.place is RowPlace.ACCELERATORS for row in rows
        )
        # Sorted by place, because each place needs a process of its own.
        rows.sort(key=lambda row: self._needed(row) is RowPlace.CPU)
        for number, row in enumerate(rows, 1):
            where = f"{self._backend.name} ({number} of {len(rows)})"
            self._progress.update(f"{where}: {row.name}")
            self._try(row)
        return seen

    def _try(self, row: Row) -> None:
        start = time.monotonic()
        if not row.job:
            self._end(row.name, Status.SKIPPED, row.reason, row.fix)
            return
        try:
            answer = self._answer(row)
        except ChildError as error:
            self._close()
            fix = REPORT if error.has_ended else LONGER
            self._end_failed(row.name, start, error, fix)
            return
        seconds = time.monotonic() - start
        name = self._backend.name
        self._results.append(
            RowResult(name, row.name, seconds=seconds, **answer)
        )

    def _answer(self, row: Row) -> dict[str, Any]:
        """Asks the process of the row's place, which is started if needed."""
        if self._child is None or self._place is not self._needed(row):
            self._close()
            self._start(self._needed(row))
        assert self._child is not None
        limit = self._settings.timeout
        return self._child.ask(row.job, row.arguments, limit)

    def _needed(self, row: Row) -> RowPlace:
        """Returns a row's place; without accelerators, all rows share one."""
        return row.place if self._has_accelerators else RowPlace.ACCELERATORS

    def _start(self, place: RowPlace) -> dict[str, Any]:
        variables = dict(CPU_ONLY) if place is RowPlace.CPU else dict(_EXACT)
        variables["KERAS_DIST_VIRTUAL_DEVICES"] = str(self._settings.devices)
        self._place = place
        self._child = Child(self._backend.name, variables)
        try:
            return self._child.answer(self._settings.timeout)
        except ChildError:
            self._close()
            raise

    def _end(self, name: str, *rest: Any) -> None:
        """Notes a `RowResult` with the rest of its fields."""
        self._results.append(RowResult(self._backend.name, name, *rest))

    def _end_failed(
        self, name: str, start: float, error: ChildError, fix: str
    ) -> None:
        seconds, lines = time.monotonic() - start, error.lines
        self._end(name, Status.FAILED, error.summary, fix, seconds, lines)

    def _close(self) -> None:
        if self._child is not None:
            self._child.close()
        self._child = None


_STYLES = {
    Status.PASSED: "green",
    Status.FAILED: "bold red",
    Status.SKIPPED: "yellow",
}


def report_of(results: Sequence[RowResult]) -> tables.TableReport:
    """Returns a table, the output of what failed, and a count by status."""
    rows, notes = [], []
    for result in results:
        to_do = f". To do: {result.fix}" if result.fix else ""
        rows.append(
            (
                result.backend,
                Text(result.name),
                Text(result.status, style=_STYLES[result.status]),
                f"{result.seconds:.0f} s" if result.seconds else "",
                Text(f"{result.details.rstrip('.')}{to_do}"),
            )
        )
        if result.last_lines:
            what = "last lines" if result.report is None else "what differs"
            notes.append(f"{result.backend}, {result.name}: {what}")
            notes.append(f"{result.last_lines}\n")
    counts = [f"{number_of(results, status)} {status}" for status in Status]
    made = tables.table(
        "",
        ("Backend", tables.WORD),
        ("Tried", tables.WORDS),
        ("Result", tables.WORD),
        ("Time", tables.NUMBER),
        ("Details", tables.WORDS),
        rows=rows,
    )
    return tables.TableReport("", [made], [*notes, ", ".join(counts)])


def number_of(results: Sequence[RowResult], status: Status) -> int:
    return sum(result.status == status for result in results)


def states_of(
    results: Sequence[RowResult], names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Returns the state of each backend, in the form `problem_of` takes."""
    states: dict[str, dict[str, Any]] = {
        name: {"works": True} for name in names
    }
    for result in results:
        if result.name == STARTS:
            is_there = result.status == Status.FAILED
            states[result.backend] = {
                "works": False,
                "problem": "can't be used, " * is_there + result.details,
                "fix": result.fix,
            }
    return states


def as_json(
    results: Sequence[RowResult],
    seen: dict[str, Any],
    versions: dict[str, str],
    problem: str,
) -> dict[str, Any]:
    """Returns all results, in types that JSON has."""
    return {
        "versions": versions,
        "backends": seen,
        "problem": problem,
        "results": [dataclasses.asdict(result) for result in results],
        **{str(s): number_of(results, s) for s in Status},
    }

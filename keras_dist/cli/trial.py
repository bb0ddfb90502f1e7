"""Trials of a backend: rows to try, run even if its process ends or hangs."""

import enum
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any

from keras_dist.cli.child import CPU_ONLY
from keras_dist.cli.child import Child
from keras_dist.cli.child import ChildError
from keras_dist.environment.packages import InstalledBackend
from keras_dist.planning.tables import names_text

# The model that is trained unless the user names another one.
OWN_MODEL = "keras_dist.cli.jobs.digits:make"


class RowPlace(enum.Enum):
    """The devices that the process of a row sees."""

    CPU = "cpu"
    ACCELERATORS = "accelerators"


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
    two = _cpus(min(2, settings.devices))
    several = sorted({len(two), settings.devices} - {1})
    rows = [_training(model, "one device", "one", _cpus(1))]
    rows += [
        _training(model, "mirrored", "mirrored", _cpus(count))
        for count in several
    ]
    rows.append(_training(model, "central storage", "central", two))
    if seen["shards_optimizer"]:
        rows.append(_training(model, "sharded optimizer", "sharded", two))
    else:
        reason = f"{backend.name} keeps it mirrored"
        fix = "use another backend if you need it"
        rows.append(Row("sharded optimizer", reason=reason, fix=fix))
    if model == OWN_MODEL:
        rows.append(_collectives("run, reduce, gather", two))
    return [
        *rows,
        *_on_accelerators(accelerators, model),
        *_over_workers(len(accelerators), settings),
    ]


def _cpus(count: int) -> list[str]:
    return [f"cpu:{index}" for index in range(count)]


def _training(
    model: str,
    name: str,
    kind: str,
    devices: Sequence[str],
    place: RowPlace = RowPlace.CPU,
) -> Row:
    arguments = {"model": model, "kind": kind, "devices": devices}
    return Row(f"{name}, {names_text(devices)}", place, "verify", arguments)


def _collectives(
    name: str, devices: Sequence[str], place: RowPlace = RowPlace.CPU
) -> Row:
    return Row(name, place, "collectives", {"devices": devices})


def _on_accelerators(devices: Sequence[str], model: str) -> list[Row]:
    if not devices:
        reason = "it sees no accelerator"
        fix = "if there is one, install the framework for it"
        return [Row("accelerators", reason=reason, fix=fix)]
    place = RowPlace.ACCELERATORS
    training = _training(model, "mirrored", "mirrored", devices, place)
    if model != OWN_MODEL:
        return [training]
    name = f"run, reduce, gather, {names_text(devices)}"
    return [training, _collectives(name, devices, place)]


def _over_workers(num_accelerators: int, settings: Settings) -> list[Row]:
    count, model = settings.workers, settings.model
    if not count:
        return [Row("workers", reason="not asked for", fix="--workers 2")]
    # Shorter than the row's limit, so that the process can end its workers
    # before it is killed.
    timeout = max(1.0, settings.timeout - 5.0)

    def row(name: str, place: RowPlace, devices: int | None) -> Row:
        arguments = {
            "model": model,
            "workers": count,
            "devices": devices,
            "timeout": timeout,
        }
        return Row(name, place, "verify workers", arguments)

    rows = [row(f"{count} workers", RowPlace.CPU, 1)]
    divide = num_accelerators >= count and num_accelerators % count == 0
    if divide and model == OWN_MODEL:
        name = f"{count} workers, all accelerators"
        rows.append(row(name, RowPlace.ACCELERATORS, None))
    return rows


STARTS = "starts"
REPORT = "report it, with what `keras-dist info` prints: it should not happen"
_LONGER = "try a longer --timeout; if it never ends, report it"
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
        begin: Callable[[str, str, int], None],
        end: Callable[[RowResult], None],
    ) -> None:
        self._backend = backend
        self._settings = settings
        self._begin = begin
        self._end = end
        self._child: Child | None = None
        self._place = RowPlace.ACCELERATORS
        self._has_accelerators = False

    def run(self) -> dict[str, Any] | None:
        """Runs all rows; returns what the backend sees, or `None`."""
        if not self._backend.is_installed:
            fix = self._backend.fix
            self._end(self._skipped(STARTS, "not installed", fix))
            return None
        self._begin(self._backend.name, STARTS, 0)
        try:
            return self._run()
        finally:
            self._close()

    def _run(self) -> dict[str, Any] | None:
        start = time.monotonic()
        try:
            seen = self._start(RowPlace.ACCELERATORS)
        except ChildError as error:
            self._end(self._failed(STARTS, start, error, self._backend.repair))
            return None
        rows = rows_for(self._backend, seen, self._settings)
        self._has_accelerators = any(
            row.place is RowPlace.ACCELERATORS for row in rows
        )
        # Sorted by place, because each place needs a process of its own.
        for row in sorted(rows, key=self._moves):
            self._begin(self._backend.name, row.name, len(rows))
            self._end(self._try(row))
        return seen

    def _moves(self, row: Row) -> bool:
        return self._has_accelerators and row.place is RowPlace.CPU

    def _try(self, row: Row) -> RowResult:
        start = time.monotonic()
        if not row.job:
            return self._skipped(row.name, row.reason, row.fix)
        try:
            answer = self._answer(row)
        except ChildError as error:
            self._close()
            fix = REPORT if error.has_ended else _LONGER
            return self._failed(row.name, start, error, fix)
        if "refused" in answer:
            return self._skipped(
                row.name, answer["refused"], "leave it mirrored"
            )
        passed = "found" in answer
        return RowResult(
            self._backend.name,
            row.name,
            Status.PASSED if passed else Status.FAILED,
            answer["found"] if passed else answer["error"],
            "" if passed else _fix(answer),
            time.monotonic() - start,
            answer.get("text", ""),
            answer.get("report"),
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

    def _close(self) -> None:
        if self._child is not None:
            self._child.close()
        self._child = None

    def _skipped(self, name: str, reason: str, fix: str) -> RowResult:
        backend = self._backend.name
        return RowResult(backend, name, Status.SKIPPED, reason, fix)

    def _failed(
        self, name: str, start: float, error: ChildError, fix: str
    ) -> RowResult:
        return RowResult(
            self._backend.name,
            name,
            Status.FAILED,
            error.summary,
            fix,
            time.monotonic() - start,
            error.lines,
        )


def _fix(answer: dict[str, Any]) -> str:
    if "text" in answer:
        return "see below"
    if answer["is_ours"]:
        return "do what it says"
    return _LONGER if answer["is_late"] else REPORT

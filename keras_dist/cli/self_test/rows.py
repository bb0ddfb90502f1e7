"""Rows: the trials of a backend, and their results."""

import enum
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any

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
    """One trial of a backend.

    `job` names the work that the backend's process does with `arguments`.
    Without a job, the row is skipped: `reason` says why, and `fix` what to do
    about it.
    """

    name: str
    place: RowPlace = RowPlace.CPU
    job: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    fix: str = ""


@dataclass(frozen=True)
class RowResult:
    """The result of one row.

    `details` is a finding or a reason, and `fix` what to do. `last_lines` is
    the end of the process' output if it failed, or the text of the report if
    numbers differ. `report` is the report of `strategy.verify`.
    """

    backend: str
    name: str
    status: Status
    details: str
    fix: str = ""
    seconds: float = 0.0
    last_lines: str = ""
    report: dict[str, Any] | None = None


@dataclass(frozen=True)
class Settings:
    """The options of `keras-dist test`.

    `workers` is the number of processes to train over, or 0; `devices` the
    largest number of virtual CPU devices; `timeout` the seconds that a row may
    take; `model` the `"module:function"` of what is trained.
    """

    workers: int = 0
    devices: int = 4
    timeout: float = 90.0
    model: str = OWN_MODEL


def rows_for(
    backend: InstalledBackend, seen: Mapping[str, Any], settings: Settings
) -> list[Row]:
    """Returns the rows to try with a backend that starts.

    `seen` is the first answer of the backend's process.
    """
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

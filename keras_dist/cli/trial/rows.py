"""Rows: the trials of a backend, and their results."""

import enum
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any

from keras_dist.environment.packages import InstalledBackend
from keras_dist.planning.text import names_text

# Another order of float32 sums changes weights by a few 1e-7. One batch whose
# rows have the wrong weight changes them by 1e-3 or more.
TOLERANCE = 1e-5
# Accelerators may choose among several algorithms for sums and products.
ACCELERATOR_TOLERANCE = 2e-4


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
    the end of the process' output if it failed, or with `--model` the text of
    the report. `report` is the report of `strategy.verify` on `--model`.
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
    take; `model` the user's `"module:function"`, or empty.
    """

    workers: int = 0
    devices: int = 4
    timeout: float = 90.0
    model: str = ""


def rows_for(
    backend: InstalledBackend, seen: Mapping[str, Any], settings: Settings
) -> list[Row]:
    """Returns the rows to try with a backend that starts.

    `seen` is the first answer of the backend's process.
    """
    accelerators = [d for d in seen["devices"] if not d.startswith("cpu:")]
    two = _cpus(min(2, settings.devices))
    several = sorted({len(two), settings.devices} - {1})
    model = settings.model
    rows = [_training("one device", "one", ["cpu:0"], model=model)]
    rows += [
        _training("mirrored", "mirrored", _cpus(count), model=model)
        for count in several
    ]
    rows.append(_training("central storage", "central", two, model=model))
    if not seen["shards_optimizer"]:
        rows.append(
            Row(
                "sharded optimizer",
                reason=f"{backend.name} keeps it mirrored",
                fix="use another backend if you need it",
            )
        )
    else:
        rows.append(_training("sharded optimizer", "sharded", two, model=model))
    if not model:
        rows.append(
            Row(
                "run, reduce, gather",
                job="collectives",
                arguments={"devices": two},
            )
        )
    return [
        *rows,
        *_on_accelerators(accelerators, model),
        *_over_workers(len(accelerators), settings),
    ]


def _cpus(count: int) -> list[str]:
    return [f"cpu:{index}" for index in range(count)]


def _training(
    name: str,
    kind: str,
    devices: Sequence[str],
    place: RowPlace = RowPlace.CPU,
    model: str = "",
) -> Row:
    name = f"{name}, {names_text(devices)}"
    if model:
        users = {"model": model, "kind": kind, "devices": devices}
        return Row(name, place, "verify", users)
    is_cpu = place is RowPlace.CPU
    tolerance = TOLERANCE if is_cpu else ACCELERATOR_TOLERANCE
    arguments = {"kind": kind, "devices": devices, "tolerance": tolerance}
    return Row(name, place, "train", arguments)


def _on_accelerators(devices: Sequence[str], model: str) -> list[Row]:
    name = "accelerators"
    if not devices:
        reason = "it sees no accelerator"
        fix = "if there is one, install the framework for it"
        return [Row(name, reason=reason, fix=fix)]
    training = _training(
        "mirrored", "mirrored", devices, RowPlace.ACCELERATORS, model
    )
    if model:
        return [training]
    return [
        training,
        Row(
            f"run, reduce, gather, {names_text(devices)}",
            RowPlace.ACCELERATORS,
            "collectives",
            {"devices": devices},
        ),
    ]


def _over_workers(num_accelerators: int, settings: Settings) -> list[Row]:
    count = settings.workers
    if not count:
        return [Row("workers", reason="not asked for", fix="--workers 2")]
    # Shorter than the row's limit, so that the process can end its workers
    # before it is killed.
    timeout = max(1.0, settings.timeout - 5.0)
    arguments: dict[str, Any] = {"workers": count, "timeout": timeout}
    if settings.model:
        arguments |= {"model": settings.model, "devices": 1}
        return [
            Row(f"{count} workers", RowPlace.CPU, "verify workers", arguments)
        ]
    on_cpu = {"devices": 1, "tolerance": TOLERANCE}
    rows = [
        Row(f"{count} workers", RowPlace.CPU, "workers", arguments | on_cpu)
    ]
    if num_accelerators >= count and num_accelerators % count == 0:
        there = {"devices": None, "tolerance": ACCELERATOR_TOLERANCE}
        rows.append(
            Row(
                f"{count} workers, all accelerators",
                RowPlace.ACCELERATORS,
                "workers",
                arguments | there,
            )
        )
    return rows

"""Runs all rows of one backend, even if its process ends or hangs."""

import time
from collections.abc import Callable
from typing import Any

from keras_dist.cli.inspection.child import CPU_ONLY
from keras_dist.cli.inspection.child import Child
from keras_dist.cli.inspection.child import ChildError
from keras_dist.cli.self_test.rows import Row
from keras_dist.cli.self_test.rows import RowPlace
from keras_dist.cli.self_test.rows import RowResult
from keras_dist.cli.self_test.rows import Settings
from keras_dist.cli.self_test.rows import Status
from keras_dist.cli.self_test.rows import rows_for
from keras_dist.environment.packages import InstalledBackend

STARTS = "starts"
REPORT = "report it, with what `keras-dist info` prints: it should not happen"
_LONGER = "try a longer --timeout; if it never ends, report it"
# Each framework has its own variable for products in full precision.
_EXACT = {
    "NVIDIA_TF32_OVERRIDE": "0",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
}


class CommandTrial:
    """Runs the rows of one backend.

    A process does one row after another. If it ends, or takes too long, that
    row has failed, and a new process does the others. `begin` is called with
    the backend's name, the name of the row that begins, and the number of rows
    (0 if not known yet); `end` with each `RowResult`.
    """

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
        """Runs all rows, and returns what the backend sees (or `None`).

        It is `None` if the backend is not installed or can't start.
        """
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
    """Returns what to do about a row that failed."""
    if "text" in answer:
        return "see below"
    if answer["is_ours"]:
        return "do what it says"
    return _LONGER if answer["is_late"] else REPORT

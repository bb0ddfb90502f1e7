"""The report of `keras-dist test`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn
from rich.progress import TimeElapsedColumn
from rich.text import Text

from keras_dist.cli.trial import STARTS
from keras_dist.cli.trial import RowResult
from keras_dist.cli.trial import Status
from keras_dist.planning import tables

_STYLES = {
    Status.PASSED: "green",
    Status.FAILED: "bold red",
    Status.SKIPPED: "yellow",
}


class Bar:
    """A progress bar on a terminal; nothing elsewhere."""

    def __init__(self, console: Console) -> None:
        self._progress = tables.progress_bar(
            console, MofNCompleteColumn(), TimeElapsedColumn()
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def begin(self, backend: str, row: str, total: int) -> None:
        """Shows the row that is being tried."""
        if backend not in self._tasks:
            self._tasks[backend] = self._progress.add_task("", total=None)
        self._progress.update(
            self._tasks[backend],
            description=f"{backend}: {row}",
            total=total or None,
        )

    def end(self, result: RowResult) -> None:
        if result.backend in self._tasks:
            self._progress.advance(self._tasks[result.backend])


def show(console: Console, results: Sequence[RowResult]) -> None:
    """Prints a table, the output of failed processes, and a count by status."""
    made = tables.table(
        "",
        ("Backend", tables.WORD),
        ("Tried", tables.WORDS),
        ("Result", tables.WORD),
        ("Time", tables.NUMBER),
        ("Details", tables.WORDS),
    )
    made.title = None
    for each in results:
        details = each.details
        if each.fix:
            details = f"{details.rstrip('.')}. To do: {each.fix}"
        made.add_row(
            each.backend,
            Text(each.name),
            Text(each.status, style=_STYLES[each.status]),
            f"{each.seconds:.0f} s" if each.seconds else "",
            Text(details),
        )
    console.print(made)
    for each in results:
        if each.last_lines:
            console.print()
            what = "last lines" if each.report is None else "what differs"
            console.print(
                Text(f"{each.backend}, {each.name}: {what}", style="bold")
            )
            console.print(Text(each.last_lines))
    console.print()
    counts = ", ".join(
        f"{number_of(results, status)} {status}" for status in Status
    )
    console.print(counts)


def number_of(results: Sequence[RowResult], status: Status) -> int:
    return sum(each.status is status for each in results)


def states_of(
    results: Sequence[RowResult], names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Returns the state of each backend, in the form `problem_of` takes."""
    states: dict[str, dict[str, Any]] = {
        name: {"works": True} for name in names
    }
    for each in results:
        if each.name == STARTS:
            is_there = each.status is Status.FAILED
            states[each.backend] = {
                "works": False,
                "problem": "can't be used, " * is_there + each.details,
                "fix": each.fix,
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
        "results": [dataclasses.asdict(each) for each in results],
        **{str(s): number_of(results, s) for s in Status},
    }

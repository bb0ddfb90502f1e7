"""A summary: what each device keeps of a model, and what a step sends."""

import io
import re
import shutil
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.console import ConsoleOptions
from rich.measure import Measurement
from rich.text import Text

from keras_dist.planning.estimates import Transfer
from keras_dist.planning.tables import NUMBER
from keras_dist.planning.tables import WORD
from keras_dist.planning.tables import WORDS
from keras_dist.planning.tables import Sheet
from keras_dist.planning.tables import alike
from keras_dist.planning.tables import bytes_text
from keras_dist.planning.tables import names_text
from keras_dist.planning.tables import transfer_sheet

GROUPS = ("trainable", "non-trainable", "optimizer", "metrics")


@dataclass(frozen=True)
class VariableRow:
    """One variable in a summary.

    Args:
        group: String, one of `"trainable"`, `"non-trainable"`, `"optimizer"`
            and `"metrics"`.
        path: String, the variable's path.
        shape: Tuple of integers.
        dtype: String.
        kind: String. `"mirrored"`: a copy on each device. `"central"`: a
            single copy, on a parameter device. `"sharded"`: a shard on each
            device. `"on-read"`: replicas may have their own values, which are
            combined when the variable is read. `"one copy"`: there is one
            replica. `"plain"`: the model has no strategy.
        num_bytes: Integer, bytes of one copy.
        kept: Tuple of pairs of a device's name and the bytes on that device.
    """

    group: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    num_bytes: int
    kept: tuple[tuple[str, int], ...]

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices that keep the variable, primary first."""
        return tuple(name for name, _ in self.kept)


@dataclass(frozen=True)
class DeviceTotal:
    """The bytes that one device keeps between steps.

    Args:
        device: String, the device's name.
        of_groups: Tuple of integers, bytes of each of `GROUPS`.
    """

    device: str
    of_groups: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all groups."""
        return sum(self.of_groups)


@dataclass(frozen=True, repr=False)
class Summary:
    """The result of `keras_dist.summary`; `print` shows it.

    Args:
        model: String, the model's name.
        strategy: String, the strategy's description; empty without one.
        rows: Tuple of `VariableRow`s, in the order of `GROUPS`.
        device_names: Tuple of strings, the devices of this worker.
        transfers: Tuple of `Transfer`s, the least that a step of `fit` sends.
        notes: Tuple of strings, sentences below the tables.
        max_rows: Integer, number of variables to show, or `None` for all.
    """

    model: str
    strategy: str
    rows: tuple[VariableRow, ...]
    device_names: tuple[str, ...]
    transfers: tuple[Transfer, ...]
    notes: tuple[str, ...]
    max_rows: int | None = None

    @property
    def devices(self) -> tuple[DeviceTotal, ...]:
        """The `DeviceTotal` of each device of this worker."""
        return tuple(
            DeviceTotal(
                name,
                tuple(
                    sum(
                        num_bytes
                        for row in self.rows
                        if row.group == group
                        for device, num_bytes in row.kept
                        if device == name
                    )
                    for group in GROUPS
                ),
            )
            for name in self.device_names
        )

    @property
    def bytes_sent(self) -> int:
        """Bytes that all devices of all workers send in a step."""
        return sum(transfer.total for transfer in self.transfers)

    def shown_rows(
        self,
    ) -> Iterable[tuple[str, tuple[VariableRow, ...], tuple[VariableRow, ...]]]:
        """Yields each group's name, the rows to show, and those left out.

        If there are more than `max_rows` rows, each group gets an equal share,
        and larger groups get the rows that smaller ones don't need.
        """
        groups = [
            (group, tuple(row for row in self.rows if row.group == group))
            for group in GROUPS
        ]
        groups = [(group, rows) for group, rows in groups if rows]
        left = len(self.rows) if self.max_rows is None else self.max_rows
        shares = {}
        by_size = sorted(groups, key=lambda each: len(each[1]))
        for index, (group, rows) in enumerate(by_size):
            shares[group] = min(len(rows), left // (len(by_size) - index))
            left -= shares[group]
        for group, rows in groups:
            yield group, rows[: shares[group]], rows[shares[group] :]

    def show(self) -> None:
        """Prints the tables to the terminal, in colour if it has colours."""
        show(Console(highlight=False), self)

    def __str__(self) -> str:
        width = shutil.get_terminal_size().columns
        file = io.StringIO()
        show(Console(file=file, width=width, highlight=False), self)
        return file.getvalue().rstrip()

    def __repr__(self) -> str:
        return (
            f"<Summary of '{self.model}': {len(self.rows)} variables on "
            f"{', '.join(self.device_names)}>"
        )

    def _repr_html_(self) -> str:
        return html(self)


def show(console: Console, summary: Summary) -> None:
    """Prints the tables of variables, devices and transfers, and the notes."""
    for index, sheet in enumerate(_sheets(summary)):
        if index:
            console.print()
        console.print(sheet.rich())
    console.print()
    for note in summary.notes:
        console.print(Text(note))


def html(summary: Summary) -> str:
    """Returns the tables of a summary as HTML."""
    tables = "".join(sheet.html() for sheet in _sheets(summary))
    notes = "".join(f"<p>{escape(note)}</p>" for note in summary.notes)
    return f"<div>{tables}{notes}</div>"


def _sheets(summary: Summary) -> Iterator[Sheet]:
    of = f", {summary.strategy}" if summary.strategy else ""
    columns: tuple[tuple[str, dict[str, Any]], ...] = (
        ("Variable", WORDS),
        ("Shape", WORDS),
        ("Dtype", WORD),
        ("Kind", WORD),
        ("Devices", WORDS),
        ("Bytes", NUMBER),
    )
    title = f"Variables of '{summary.model}'{of}"
    yield Sheet(title, columns, _variables(summary))
    groups = ((group.capitalize(), NUMBER) for group in GROUPS)
    columns = (("Device", WORDS), *groups, ("Total", NUMBER))
    yield Sheet("Each device keeps", columns, _devices(summary))
    if summary.transfers:
        yield transfer_sheet(summary.transfers)


def _variables(summary: Summary) -> Iterator[Sequence[Any]]:
    blank = ("", "", "", "")
    for group, shown, hidden in summary.shown_rows():
        total = Text(_sum((*shown, *hidden)), style="bold")
        yield (Text(group, style="bold"), *blank, total)
        for row in shown:
            yield (
                _Path(row.path),
                str(row.shape),
                row.dtype,
                row.kind,
                names_text(row.devices),
                bytes_text(row.num_bytes),
            )
        if hidden:
            text = _hidden_text(len(shown), len(hidden))
            yield (Text(f"  {text}", style="italic"), *blank, _sum(hidden))


def _hidden_text(num_shown: int, num_hidden: int) -> str:
    """Returns the text in place of a group's rows that are left out."""
    if num_shown:
        return f"and {num_hidden} more"
    return f"{num_hidden} variable{'' if num_hidden == 1 else 's'}"


class _Path:
    """A path that wraps after `/` and `_`, and inside of words if needed."""

    def __init__(self, path: str) -> None:
        self.plain = path
        self._parts = re.findall(r"[^/_]*[/_]|[^/_]+", path)

    def __rich_measure__(
        self, console: Console, options: ConsoleOptions
    ) -> Measurement:
        widths = [cell_len(part) for part in self._parts]
        return Measurement(4 + max(widths, default=0), 2 + sum(widths))

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[Text]:
        line = "  "
        for part in self._parts:
            if line.strip() and cell_len(line + part) > options.max_width:
                yield Text(line, overflow="fold")
                line = "    "
            line += part
        yield Text(line, overflow="fold")


def _sum(rows: Sequence[VariableRow]) -> str:
    return bytes_text(sum(row.num_bytes for row in rows))


def _devices(summary: Summary) -> Iterator[Sequence[str]]:
    """Yields a row for each set of devices that keep the same."""
    pairs = ((each.device, each.of_groups) for each in summary.devices)
    for names, of_groups in alike(pairs):
        numbers = (*of_groups, sum(of_groups))
        yield (names, *map(bytes_text, numbers))

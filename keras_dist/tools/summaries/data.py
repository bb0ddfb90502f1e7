"""A summary: what each device keeps of a model, and what a step sends."""

import io
import re
import shutil
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rich.cells import cell_len
from rich.console import Console
from rich.console import ConsoleOptions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from keras_dist.planning.html import html_table
from keras_dist.planning.tables import NUMBER
from keras_dist.planning.tables import TRANSFER_COLUMNS
from keras_dist.planning.tables import TRANSFER_TITLE
from keras_dist.planning.tables import WORD
from keras_dist.planning.tables import WORDS
from keras_dist.planning.tables import alike
from keras_dist.planning.tables import table
from keras_dist.planning.tables import transfer_rows
from keras_dist.planning.tables import transfer_table
from keras_dist.planning.text import bytes_text
from keras_dist.planning.text import names_text
from keras_dist.planning.traffic import Transfer

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
        from rich.console import Console

        show(Console(highlight=False), self)

    def __str__(self) -> str:
        from rich.console import Console

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


def hidden_text(num_shown: int, num_hidden: int) -> str:
    """Returns the text in place of a group's rows that are left out."""
    if num_shown:
        return f"and {num_hidden} more"
    return f"{num_hidden} variable{'' if num_hidden == 1 else 's'}"


def show(console: Console, summary: Summary) -> None:
    """Prints the tables of variables, devices and transfers, and the notes."""
    of = f", {summary.strategy}" if summary.strategy else ""
    console.print(_variables(summary, f"Variables of '{summary.model}'{of}"))
    console.print()
    console.print(_devices(summary))
    if summary.transfers:
        console.print()
        console.print(transfer_table(summary.transfers))
    console.print()
    for note in summary.notes:
        console.print(Text(note))


def _variables(summary: Summary, title: str) -> Table:
    made = table(
        title,
        ("Variable", WORDS),
        ("Shape", WORDS),
        ("Dtype", WORD),
        ("Kind", WORD),
        ("Devices", WORDS),
        ("Bytes", NUMBER),
    )
    for group, shown, hidden in summary.shown_rows():
        rows = (*shown, *hidden)
        made.add_row(
            Text(group, style="bold"),
            *("", "", "", ""),
            Text(_sum(rows), style="bold"),
        )
        for row in shown:
            made.add_row(
                _Path(row.path),
                str(row.shape),
                row.dtype,
                row.kind,
                names_text(row.devices),
                bytes_text(row.num_bytes),
            )
        if hidden:
            text = hidden_text(len(shown), len(hidden))
            made.add_row(
                Text(f"  {text}", style="italic"),
                *("", "", "", ""),
                _sum(hidden),
            )
    return made


class _Path:
    """A path that wraps after `/` and `_`, and inside of words if needed."""

    def __init__(self, path: str) -> None:
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


def _sum(rows: tuple[VariableRow, ...]) -> str:
    return bytes_text(sum(row.num_bytes for row in rows))


def _devices(summary: Summary) -> Table:
    made = table(
        "Each device keeps",
        ("Device", WORDS),
        *((group.capitalize(), NUMBER) for group in GROUPS),
        ("Total", NUMBER),
    )
    for names, of_groups in same_devices(summary):
        made.add_row(
            names, *map(bytes_text, of_groups), bytes_text(sum(of_groups))
        )
    return made


def same_devices(summary: Summary) -> list[tuple[str, tuple[int, ...]]]:
    """Returns names and bytes of devices, joining those that keep the same."""
    return alike((each.device, each.of_groups) for each in summary.devices)


def html(summary: Summary) -> str:
    """Returns the tables of a summary as HTML."""
    of = f", {summary.strategy}" if summary.strategy else ""
    parts = [
        html_table(
            f"Variables of '{summary.model}'{of}",
            ("Variable", "Shape", "Dtype", "Kind", "Devices", "Bytes"),
            _variable_cells(summary),
        ),
        html_table(
            "Each device keeps",
            ("Device", *(group.capitalize() for group in GROUPS), "Total"),
            (
                (names, *map(bytes_text, groups), bytes_text(sum(groups)))
                for names, groups in same_devices(summary)
            ),
        ),
    ]
    if summary.transfers:
        parts.append(
            html_table(
                TRANSFER_TITLE,
                [head for head, _ in TRANSFER_COLUMNS],
                transfer_rows(summary.transfers),
            )
        )
    notes = "".join(f"<p>{escape(note)}</p>" for note in summary.notes)
    return f"<div>{''.join(parts)}{notes}</div>"


def _variable_cells(summary: Summary) -> Iterable[Sequence[str]]:
    for group, shown, hidden in summary.shown_rows():
        total = sum(row.num_bytes for row in (*shown, *hidden))
        yield (group, "", "", "", "", bytes_text(total))
        for row in shown:
            yield (
                row.path,
                str(row.shape),
                row.dtype,
                row.kind,
                names_text(row.devices),
                bytes_text(row.num_bytes),
            )
        if hidden:
            rest = sum(row.num_bytes for row in hidden)
            text = hidden_text(len(shown), len(hidden))
            yield (text, "", "", "", "", bytes_text(rest))

"""Tables of a summary in a terminal."""

import re
from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Console
from rich.console import ConsoleOptions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from keras_dist.summaries.data import GROUPS
from keras_dist.summaries.data import Summary
from keras_dist.summaries.data import VariableRow
from keras_dist.summaries.data import hidden_text
from keras_dist_cli.planning.tables import NUMBER
from keras_dist_cli.planning.tables import WORD
from keras_dist_cli.planning.tables import WORDS
from keras_dist_cli.planning.tables import alike
from keras_dist_cli.planning.tables import table
from keras_dist_cli.planning.tables import transfer_table
from keras_dist_cli.planning.text import bytes_text
from keras_dist_cli.planning.text import names_text


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

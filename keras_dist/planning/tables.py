"""Readable numbers and names, and tables for terminals and notebooks."""

import io
import re
import shutil
from abc import ABC
from abc import abstractmethod
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.console import ConsoleOptions
from rich.jupyter import JupyterMixin
from rich.progress import BarColumn
from rich.progress import Progress
from rich.progress import ProgressColumn
from rich.progress import TextColumn
from rich.table import Table
from rich.text import Text

from keras_dist.planning.estimates import Memory
from keras_dist.planning.estimates import Transfer

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_OF_BYTES = {"": 1.0} | {
    prefix + binary: base**power
    for power, prefix in enumerate("kmgtp", 1)
    for binary, base in (("", 1e3), ("i", 1024.0))
}
_NUMBER = re.compile(r"(\d+(?:\.\d*)?(?:e\+?\d+)?)\s*([a-z]*)", re.IGNORECASE)
_MOST = 1e18
_NAME = re.compile(r"(.*\D)(\d+)")

T = TypeVar("T", bound=Hashable)

# Options of a column.
WORDS: dict[str, Any] = {"overflow": "fold"}
WORD: dict[str, Any] = {"no_wrap": True}
NUMBER: dict[str, Any] = {"justify": "right", "no_wrap": True}

_OPTIONAL = ("Copies", "Activations")
_MEMORY = {
    "Parameters": "parameters",
    "Optimizer": "optimizer",
    "Kept between steps": "kept",
    "Copies": "copies",
    "Gradients": "gradients",
    "Activations": "activations",
    "Held in a step": "most",
}


def bytes_text(num_bytes: int) -> str:
    """Returns bytes with about three digits, in powers of 1,000."""
    number, unit = float(num_bytes), 0
    while number >= 999.95 and unit < len(_UNITS) - 1:
        number, unit = number / 1e3, unit + 1
    return f"{number:.1f} {_UNITS[unit]}" if unit else f"{num_bytes} B"


def read_number(text: str) -> int:
    """Reads a count as people write it: `7e9`, `7B`, `350M`, `20_000`."""
    number = _read(text, _SUFFIXES)
    if number is None:
        raise ValueError(
            f"A number from 1 to 1e18 could not be read. Received: {text!r}. "
            "Expected: digits, such as 350000, 7e9, or with k, M, B or T, "
            "such as 7B."
        )
    return number


def read_bytes(text: str) -> int:
    """Reads a number of bytes as people write it: `20e9`, `20G`, `512 MiB`."""
    number = _read(text.strip().lower().removesuffix("b"), _OF_BYTES)
    if number is None:
        raise ValueError(
            "A number of bytes from 1 to 1e18 could not be read. Received: "
            f"{text!r}. Expected: digits, such as 20e9, or with a unit, such "
            "as 20G, 20GB or 20GiB."
        )
    return number


def _read(text: str, suffixes: Mapping[str, float]) -> int | None:
    match = _NUMBER.fullmatch(text.strip().replace("_", "").replace(",", ""))
    suffix = match[2].lower() if match else ""
    if match is None or suffix not in suffixes:
        return None
    number = float(match[1]) * suffixes[suffix]
    return round(number) if 1 <= number <= _MOST else None


def names_text(names: Iterable[str]) -> str:
    """Joins names; numbers that follow each other become a range: `cpu:0-3`."""
    runs: list[tuple[str, int, int]] = []
    parts: list[str] = []
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            parts.append(name)
            runs.append((name, -1, -1))
            continue
        stem, number = match[1], int(match[2])
        if runs and runs[-1][0] == stem and runs[-1][2] == number - 1:
            runs[-1] = (stem, runs[-1][1], number)
            parts[-1] = f"{stem}{runs[-1][1]}-{number}"
        else:
            runs.append((stem, number, number))
            parts.append(name)
    return " ".join(parts)


def table(
    title: str,
    *columns: tuple[str, dict[str, Any]],
    rows: Iterable[Sequence[Any]] = (),
) -> Table:
    """Returns a table with a line under its head only."""
    made = Table(
        title=Text(title) if title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for name, options in columns:
        made.add_column(name, **options)
    for row in rows:
        made.add_row(*row)
    return made


def pairs_table(pairs: Mapping[str, Any]) -> Table:
    """Returns a table of names and values, without a head and lines."""
    made = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    made.add_column(overflow="fold")
    made.add_column(overflow="fold")
    for name, value in pairs.items():
        made.add_row(Text(name), Text(str(value)))
    return made


def progress_bar(
    console: Console, *columns: ProgressColumn, transient: bool = True
) -> Progress:
    """Returns a bar of rich with a description; on a terminal it is shown."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        *columns,
        console=console,
        transient=transient,
        disable=not console.is_terminal,
    )


@dataclass(frozen=True)
class TableReport(JupyterMixin):
    """A title, tables and sentences, which rich and notebooks show.

    Args:
        title: String, may be empty.
        tables: Sequence of tables of rich.
        notes: Sequence of strings, paragraphs below the tables.
    """

    title: str
    tables: Sequence[Table]
    notes: Sequence[str] = ()

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[Table | Text]:
        if self.title:
            yield Text(self.title)
            yield Text()
        for report_table in self.tables:
            yield report_table
            yield Text()
        for note in self.notes:
            yield Text(note)

    def show(self) -> None:
        """Prints the report to the terminal, in colour if it has colours."""
        Console(highlight=False).print(self)

    def __str__(self) -> str:
        width = shutil.get_terminal_size().columns
        file = io.StringIO()
        # In a notebook, rich would write to the notebook, not to the file.
        Console(
            file=file, width=width, highlight=False, force_jupyter=False
        ).print(self)
        return file.getvalue().rstrip()


class Shown(JupyterMixin, ABC):
    """A result that `print`, rich and notebooks show as its `TableReport`."""

    @abstractmethod
    def __rich__(self) -> TableReport:
        """Returns what is shown."""

    def show(self) -> None:
        """Prints the result to the terminal, in colour if it has colours."""
        self.__rich__().show()

    def __str__(self) -> str:
        return str(self.__rich__())


def alike(pairs: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
    """Merges pairs that have the same second item; joins their names."""
    groups: dict[T, list[str]] = {}
    for name, what in pairs:
        groups.setdefault(what, []).append(name)
    return [(names_text(names), what) for what, names in groups.items()]


def transfer_table(transfers: Sequence[Transfer]) -> Table:
    """Returns a table of the bytes that each device or worker sends."""
    made = table(
        "Each step sends, estimated",
        ("What", WORDS),
        ("Between", WORD),
        ("From each of", WORDS),
        ("Bytes", NUMBER),
        ("In total", NUMBER),
    )
    for transfer in transfers:
        what, between = transfer.what, transfer.between
        total = bytes_text(transfer.total)
        for names, num_bytes in alike(transfer.sent):
            made.add_row(what, between, names, bytes_text(num_bytes), total)
            # Cells that would repeat the row above are empty.
            what = between = total = ""
    return made


def memory_table(title: str, memory: Mapping[str, Memory]) -> Table:
    """Returns a table of memory; devices that hold the same share a column."""
    groups = alike(memory.items())
    made = table(title, ("", WORD), *((names, NUMBER) for names, _ in groups))
    for head, field in _MEMORY.items():
        numbers = [getattr(device_memory, field) for _, device_memory in groups]
        if any(numbers) or head not in _OPTIONAL:
            style = "bold" if field in ("kept", "most") else ""
            made.add_row(head, *map(bytes_text, numbers), style=style)
    return made

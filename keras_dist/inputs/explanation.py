"""Explanation: the rows of a batch that go to each replica, as a table."""

import io
import shutil
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    from rich.console import Console

_COLUMNS = ("Worker", "Replica", "Device", "Rows", "Number", "Shape")
_READERS = {
    "fit": "as `fit` and its relatives cut it",
    "run": "as `strategy.run` gets it",
}


@dataclass(frozen=True)
class ReplicaRows:
    """One replica's rows of a batch.

    Args:
        worker: Integer, the worker's position.
        replica: Integer, the replica's position among those of all workers.
        device: String, the replica's device; `None` for a replica of another
            worker, whose devices are not known here.
        rows: `range` of rows, counted within the global batch.
        shape: Nest like the batch, of the shapes of the replica's arrays;
            `None` where only another worker knows them.
    """

    worker: int
    replica: int
    device: str | None
    rows: range
    shape: Any

    @property
    def first(self) -> int | None:
        """The first row, or `None` if there are none."""
        return self.rows[0] if self.rows else None

    @property
    def last(self) -> int | None:
        """The last row, or `None` if there are none."""
        return self.rows[-1] if self.rows else None

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.rows)


@dataclass(frozen=True, repr=False)
class Explanation:
    """The rows of a batch that each replica gets; `print` shows a table.

    Args:
        strategy: String, the strategy's description.
        reader: String, `"fit"` for a global batch that `fit` splits, `"run"`
            for an element of a distributed dataset.
        rows: Tuple of `ReplicaRows`, in replica order.
        num_rows: Integer, number of rows of the global batch.
        notes: Tuple of strings, sentences below the table.
    """

    strategy: str
    reader: str
    rows: tuple[ReplicaRows, ...]
    num_rows: int
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[ReplicaRows]:
        return iter(self.rows)

    def show(self) -> None:
        """Prints the table to the terminal."""
        from rich.console import Console

        self._print(Console(highlight=False))

    def __str__(self) -> str:
        from rich.console import Console

        width = shutil.get_terminal_size().columns
        file = io.StringIO()
        self._print(Console(file=file, width=width, highlight=False))
        return file.getvalue().rstrip()

    def __repr__(self) -> str:
        counts = ", ".join(str(row.num_rows) for row in self.rows)
        return f"<Explanation of {self.num_rows} rows: {counts}>"

    def _repr_html_(self) -> str:
        from keras_dist.planning.html import html_table

        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        table = html_table(self._title, _COLUMNS, map(_cells, self.rows))
        return f"<div>{table}{notes}</div>"

    @property
    def _title(self) -> str:
        return (
            f"{self.strategy}: a batch of {self.num_rows} "
            f"row{'' if self.num_rows == 1 else 's'}, "
            f"{_READERS[self.reader]}"
        )

    def _print(self, console: "Console") -> None:
        from rich.text import Text

        from keras_dist.planning.tables import NUMBER
        from keras_dist.planning.tables import WORDS
        from keras_dist.planning.tables import table

        kinds = (NUMBER, NUMBER, WORDS, NUMBER, NUMBER, WORDS)
        made = table("", *zip(_COLUMNS, kinds, strict=True))
        made.title = None
        for row in self.rows:
            made.add_row(*map(Text, _cells(row)))
        console.print(Text(self._title))
        console.print()
        console.print(made)
        for note in self.notes:
            console.print(Text(note))


def _cells(row: ReplicaRows) -> Sequence[str]:
    rows = "none" if row.first is None else f"{row.first} to {row.last}"
    return (
        str(row.worker),
        str(row.replica),
        row.device or "its own",
        rows,
        str(row.num_rows),
        "" if row.shape is None else str(row.shape),
    )

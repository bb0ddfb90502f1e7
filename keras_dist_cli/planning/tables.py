"""Tables in a terminal, of what is planned."""

from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

from rich import box
from rich.table import Table
from rich.text import Text

from keras_dist_cli.planning.placement import Memory
from keras_dist_cli.planning.text import bytes_text
from keras_dist_cli.planning.text import names_text
from keras_dist_cli.planning.traffic import Transfer

T = TypeVar("T", bound=Hashable)

# What a column is like.
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


def table(title: str, *columns: tuple[str, dict[str, Any]]) -> Table:
    """A table with lines under its head only.

    Args:
        title: String, which may have brackets in it.
        columns: Pairs of a head, and `WORDS`, `WORD` or `NUMBER`.
    """
    made = Table(
        title=Text(title),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for name, options in columns:
        made.add_column(name, **options)
    return made


def alike(pairs: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
    """Pairs of a name and what it has, those that have the same as one."""
    found: dict[T, list[str]] = {}
    for name, what in pairs:
        found.setdefault(what, []).append(name)
    return [(names_text(names), what) for what, names in found.items()]


def transfer_rows(
    transfers: Sequence[Transfer],
) -> Iterable[tuple[str, str, str, str, str]]:
    """Of each kind, and of those who send as much, a row.

    What is the same as in the row above is empty.
    """
    for transfer in transfers:
        for index, (names, num_bytes) in enumerate(alike(transfer.sent)):
            yield (
                "" if index else transfer.what,
                "" if index else transfer.between,
                names,
                bytes_text(num_bytes),
                "" if index else bytes_text(transfer.total),
            )


TRANSFER_TITLE = "Each step sends, estimated"
TRANSFER_COLUMNS = (
    ("What", WORDS),
    ("Between", WORD),
    ("From each of", WORDS),
    ("Bytes", NUMBER),
    ("In total", NUMBER),
)


def transfer_table(transfers: Sequence[Transfer]) -> Table:
    """Who sends what."""
    made = table(TRANSFER_TITLE, *TRANSFER_COLUMNS)
    for row in transfer_rows(transfers):
        made.add_row(*row)
    return made


def memory_table(title: str, memory: Mapping[str, Memory]) -> Table:
    """What each device holds; a column for devices that hold the same.

    Args:
        title: String.
        memory: Mapping from the names of devices to `Memory`.
    """
    groups = alike(memory.items())
    made = table(title, ("", WORD), *((names, NUMBER) for names, _ in groups))
    for head, field in _MEMORY.items():
        numbers = [getattr(each, field) for _, each in groups]
        if any(numbers) or head not in _OPTIONAL:
            style = "bold" if field in ("kept", "most") else ""
            made.add_row(head, *map(bytes_text, numbers), style=style)
    return made

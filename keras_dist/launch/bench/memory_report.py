"""Table and JSON of what memory was measured."""

from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import keras
from rich.console import Console
from rich.table import Table

from keras_dist.launch.bench.live import MeasuredMemory
from keras_dist.launch.bench.report import machine
from keras_dist.launch.bench.report import versions
from keras_dist_cli.planning.tables import NUMBER
from keras_dist_cli.planning.tables import WORD
from keras_dist_cli.planning.tables import alike
from keras_dist_cli.planning.tables import table
from keras_dist_cli.planning.text import bytes_text


def show_memory(
    console: Console, measured: Sequence[MeasuredMemory], counted: str
) -> None:
    """Prints what devices hold, and what that is.

    Args:
        console: The `rich` console to write to.
        measured: Sequence of `MeasuredMemory`, the first of plain Keras.
        counted: String, what the backend counts.
    """
    console.print(memory_table(measured))
    console.print()
    names = ", ".join(f"{name} {each}" for name, each in versions().items())
    console.print(f"{names}; {machine()}.")
    console.print(
        f"A model of {measured[0].parameters:,} parameters, float32, with "
        "Adam, after a step of `fit`; each arm in a process of its own. "
        "Planned: what `keras-dist plan` computes, without metrics and what "
        f"the framework keeps for itself. {counted}"
    )


def memory_table(measured: Sequence[MeasuredMemory]) -> Table:
    """A row for devices that hold the same, of each arm."""
    made = table(
        "Held between steps",
        ("", WORD),
        ("Device", WORD),
        ("Measured", NUMBER),
        ("Planned", NUMBER),
        ("Of plain Keras", NUMBER),
        ("Sent in a step", NUMBER),
    )
    plain = max(measured[0].measured.values())
    for each in measured:
        for index, (names, numbers) in enumerate(alike(_pairs(each))):
            held, planned = numbers
            made.add_row(
                "" if index else each.arm,
                names,
                bytes_text(held),
                bytes_text(planned),
                f"{held / plain:.2f}",
                "" if index else bytes_text(each.bytes_sent),
            )
    return made


def _pairs(each: MeasuredMemory) -> Iterable[tuple[str, tuple[int, int]]]:
    for name, held in each.measured.items():
        yield name, (held, each.planned.get(name, 0))


def memory_json(
    measured: Sequence[MeasuredMemory], counted: str
) -> dict[str, Any]:
    """All that was measured, in types that JSON has.

    Args:
        measured: Sequence of `MeasuredMemory`.
        counted: String, what the backend counts.

    Returns:
        Dict with `"backend"`, `"versions"`, `"machine"`, `"counted"` and
        `"arms"`, a dict with each by name. Numbers are bytes.
    """
    return {
        "backend": keras.backend.backend(),
        "versions": versions(),
        "machine": machine(),
        "counted": counted,
        "arms": {
            each.arm: {
                "parameters": each.parameters,
                "measured": dict(each.measured),
                "planned": dict(each.planned),
                "bytes_sent": each.bytes_sent,
            }
            for each in measured
        },
    }

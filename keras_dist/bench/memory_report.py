"""The report on measured memory."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from keras_dist.bench.output import BenchReport
from keras_dist.bench.plot import draw_bytes
from keras_dist.bench.report import header
from keras_dist.bench.report import where
from keras_dist.planning.tables import NUMBER
from keras_dist.planning.tables import WORD
from keras_dist.planning.tables import alike
from keras_dist.planning.tables import table
from keras_dist.planning.text import bytes_text


@dataclass(frozen=True)
class MeasuredMemory:
    """The memory of one arm between steps.

    Args:
        arm: The arm's name.
        parameters: Number of trainable parameters.
        measured: Bytes alive on each device, by its name.
        planned: Bytes on each device that `keras-dist plan` computes.
        bytes_sent: Bytes sent in a step that `keras-dist plan` computes.
    """

    arm: str
    parameters: int
    measured: Mapping[str, int]
    planned: Mapping[str, int]
    bytes_sent: int


def report_of_memory(
    measured: Sequence[MeasuredMemory], counted: str
) -> BenchReport:
    """Returns the report on the bytes that devices hold in each arm.

    The first item of `measured` is plain Keras; `counted` says what the backend
    counts.
    """
    return BenchReport(
        tables=[memory_table(measured)],
        text=[
            where(),
            f"A model of {measured[0].parameters:,} parameters, float32, with "
            "Adam, after a step of `fit`; each arm in a process of its own. "
            "Planned: what `keras-dist plan` computes, without metrics and "
            f"what the framework keeps for itself. {counted}",
        ],
        content=header("memory")
        | {
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
        },
        draw=lambda path: draw_bytes(
            path, {each.arm: each.measured for each in measured}
        ),
    )


def memory_table(measured: Sequence[MeasuredMemory]) -> Table:
    """Returns a table; in each arm, devices that hold the same share a row."""
    made = table(
        "Held between steps",
        ("Arm", WORD),
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

"""Views of a report, for a terminal and for a notebook."""

from collections.abc import Iterator
from html import escape

from rich.console import Console
from rich.text import Text

from keras_dist.planning.tables import NUMBER
from keras_dist.planning.tables import WORD
from keras_dist.planning.tables import WORDS
from keras_dist.planning.tables import table
from keras_dist.tools.summaries.html import html_table
from keras_dist.verification.report import PAGE
from keras_dist.verification.report import Difference
from keras_dist.verification.report import Report

_COLUMNS = (
    ("Phase", WORD),
    ("What", WORDS),
    ("Compared", NUMBER),
    ("Largest", NUMBER),
    ("Of", WORDS),
    ("Found", WORD),
)
_MOST_LAYERS = 5


def show(console: Console, report: Report) -> None:
    """Prints a table of all comparisons, the verdict and the notes."""
    made = table(_title(report), *_COLUMNS)
    for row in _rows(report):
        made.add_row(*row)
    console.print(made)
    console.print()
    for line in _lines(report):
        console.print(Text(line))


def html(report: Report) -> str:
    """Returns the table, the verdict and the notes as HTML."""
    names = [name for name, _ in _COLUMNS]
    lines = "".join(f"<p>{escape(line)}</p>" for line in _lines(report))
    return (
        f"<div>{html_table(_title(report), names, _rows(report))}{lines}</div>"
    )


def _title(report: Report) -> str:
    return f"'{report.model}' on {report.strategy}, and on one device"


def _rows(report: Report) -> Iterator[tuple[str, ...]]:
    groups: dict[tuple[str, str], list[Difference]] = {}
    for each in report.differences:
        groups.setdefault((each.phase, each.kind), []).append(each)
    for (phase, kind), found in groups.items():
        different = [each for each in found if each.differs]
        worst = max(different or found, key=lambda each: each.relative)
        yield (
            phase,
            kind,
            str(len(found)),
            f"{worst.relative:.1e}",
            worst.name,
            "differs" if different else "same",
        )


def _lines(report: Report) -> Iterator[str]:
    sizes = ", ".join(map(str, report.batches))
    yield f"Batches of {sizes} rows."
    yield from report.notes
    yield report.verdict
    if report.by_layer:
        yield "Gradients that differ most, relative to the largest entry:"
        for path, relative in report.by_layer[:_MOST_LAYERS]:
            yield f"  {path}: {relative:.1e}"
    if not report.same:
        yield f"See '{report.section}' in {PAGE}."

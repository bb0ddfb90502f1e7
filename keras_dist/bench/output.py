"""The output of a benchmark: terminal, JSON and picture."""

import json
import pathlib
import textwrap
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Column
from rich.table import Table

from keras_dist.bench.measurement import Measurement
from keras_dist.bench.plot import draw_ratios
from keras_dist.bench.report import arm_table
from keras_dist.bench.report import header
from keras_dist.bench.report import meaning
from keras_dist.bench.report import ratio_table
from keras_dist.bench.report import settings_json
from keras_dist.bench.report import where


@dataclass(frozen=True)
class BenchReport:
    """The results of a command.

    `text` has paragraphs that explain the tables, `content` all numbers in
    types that JSON has. `draw` draws them into a file.
    """

    tables: Sequence[Table]
    text: Sequence[str]
    content: Mapping[str, Any]
    draw: Callable[[pathlib.Path], None]


@dataclass(frozen=True)
class Output:
    """The destinations of a report besides the terminal.

    With `markdown`, the terminal gets Markdown.
    """

    json: pathlib.Path | None = None
    plot: pathlib.Path | None = None
    markdown: bool = False

    def publish(self, report: BenchReport) -> None:
        """Shows a report and writes its files."""
        if self.markdown:
            print(markdown_of(report))
        else:
            console = Console(highlight=False)
            for table in report.tables:
                console.print(table)
                console.print()
            for paragraph in report.text:
                console.print(paragraph, markup=False)
        if self.json is not None:
            self.json.write_text(json.dumps(report.content, indent=2) + "\n")
        if self.plot is not None:
            report.draw(self.plot)


def report_of(
    command: str,
    measured: Sequence[Measurement],
    native: str,
    text: Sequence[str],
    **more: Any,
) -> BenchReport:
    """Returns the report of a command that compares times.

    `native` describes the framework's own arms, and `text` the others. `more`
    is added to the JSON.
    """
    base = measured[0].base
    return BenchReport(
        tables=[ratio_table(measured), arm_table(measured)],
        text=[
            where(),
            f"Native: {native}",
            *text,
            meaning(f"the arm '{base}'"),
        ],
        content=header(command)
        | {"native": native, "settings": settings_json(measured)}
        | more,
        draw=lambda path: draw_ratios(path, measured),
    )


def markdown_of(report: BenchReport) -> str:
    """Returns a report as Markdown, to be pasted into a page."""
    parts = [markdown_table(table) for table in report.tables]
    parts += [textwrap.fill(paragraph, 80) for paragraph in report.text]
    return "\n\n".join(parts)


def markdown_table(table: Table) -> str:
    """Returns a table as Markdown."""
    columns = [
        [_head(column), *(str(cell) for cell in column.cells)]
        for column in table.columns
    ]
    rules = [
        "---:" if column.justify == "right" else "---"
        for column in table.columns
    ]
    head, *rows = zip(*columns, strict=True)
    lines = [head, rules, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _head(column: Column) -> str:
    return " ".join(str(column.header).split())

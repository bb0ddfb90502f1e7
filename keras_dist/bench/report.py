"""The output of a benchmark: tables, sentences, JSON and a picture."""

import dataclasses
import json
import os
import pathlib
import platform
import textwrap
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

from keras_dist.bench import measure
from keras_dist.environment.packages import version_of
from keras_dist.planning import tables


@dataclasses.dataclass(frozen=True)
class Column:
    """The format of a column of numbers."""

    head: str
    unit: float
    digits: int
    missing: str  # stands for a number that is not known

    @property
    def lines(self) -> str:
        """The head, one word in a line: narrow enough for any terminal."""
        return self.head.replace(" ", "\n")

    def text(self, number: float | None) -> str:
        if number is None:
            return self.missing
        return f"{number / self.unit:.{self.digits}f}"


TIME = Column("Time, ms", 1e-3, 3, "")
# Columns for `Measurement.counts`, in this order; other counts are in the JSON
# only.
COLUMNS = {
    "calls": Column("Python calls", 1, 0, "not counted"),
    "collectives": Column("Collectives", 1, 1, "not counted"),
    "traced_again": Column("Traced again", 1, 0, "eager"),
    "bytes_sent": Column("Sent, kB", 1e3, 1, "not counted"),
    "least_bytes": Column("Least, kB", 1e3, 1, "not counted"),
    "planned_bytes": Column("To send, kB", 1e3, 1, "not known"),
    "live_bytes": Column("Live, MB", 1e6, 2, "not counted"),
}


def header(command: str) -> dict[str, Any]:
    """Returns the first items of each command's JSON: versions, machine."""
    backend = keras.backend.backend()
    system = f"{platform.system()} {platform.machine()}"
    return {
        "command": f"bench {command}",
        "backend": backend,
        "versions": {
            backend: version_of(backend),
            "keras": keras.__version__,
            "keras-dist": version("keras-dist"),
            "python": platform.python_version(),
        },
        "machine": f"{system}, {os.cpu_count()} CPU cores",
    }


def meaning(base: str) -> str:
    """Returns an explanation of ratios and verdicts."""
    least, most = measure.NOISE
    return (
        "Ratios are medians of paired blocks, with quartiles. A/A is the arm "
        f"'{base}' against a copy of itself. If that ratio is outside of "
        f"{least} to {most}, or its quartiles are more than {measure.SPREAD} "
        f"apart, the verdict is noise. With fewer than {measure.LEAST_ROUNDS} "
        "rounds there is no verdict."
    )


def ratio_table(measurements: Sequence[measure.Measurement]) -> Table:
    """Returns a table with a row for each comparison."""
    made = tables.table(
        "Time of a step, as a ratio",
        ("Model", tables.WORDS),
        ("N", tables.NUMBER),
        ("Compared", tables.WORD),
        ("Ratio", tables.NUMBER),
        ("A/A", tables.NUMBER),
        ("Verdict", tables.WORD),
    )
    for each in measurements:
        for row in each.comparisons():
            made.add_row(
                each.setting.size.name,
                str(each.setting.num_replicas),
                row.name,
                str(row.ratio),
                str(each.noise),
                row.verdict,
            )
        made.add_section()
    return made


def arm_table(measurements: Sequence[measure.Measurement]) -> Table:
    """Returns a table with each arm's time and counts."""
    counted = {name for each in measurements for name in each.counts}
    names = [name for name in COLUMNS if name in counted]
    made = tables.table(
        "Of a step",
        ("Model", tables.WORDS),
        ("N", tables.NUMBER),
        ("Arm", tables.WORD),
        (TIME.lines, tables.NUMBER),
        *((COLUMNS[name].lines, tables.NUMBER) for name in names),
    )
    for each in measurements:
        for arm in [arm for arm in each.times if arm != measure.AGAIN]:
            made.add_row(
                each.setting.size.name,
                str(each.setting.num_replicas),
                arm,
                TIME.text(float(np.median(each.times[arm]))),
                *(_cell(each, name, arm) for name in names),
            )
        made.add_section()
    return made


def _cell(each: measure.Measurement, name: str, arm: str) -> str:
    numbers = each.counts.get(name, {})
    return COLUMNS[name].text(numbers[arm]) if arm in numbers else ""


def settings_json(
    measurements: Sequence[measure.Measurement],
) -> list[dict[str, Any]]:
    """Returns all measurements for JSON; times are in seconds."""
    return [
        {
            "model": each.setting.size.name,
            "replicas": each.setting.num_replicas,
            "devices": each.setting.devices,
            "rows": each.setting.size.rows,
            "widths": each.setting.size.widths,
            "steps": each.steps,
            "noise": dataclasses.asdict(each.noise),
            "comparisons": [
                dataclasses.asdict(row) for row in each.comparisons()
            ],
            "counts": each.counts,
            "losses": each.losses,
            "times": each.times,
        }
        for each in measurements
    ]


@dataclasses.dataclass(frozen=True)
class BenchReport:
    """The results of a command."""

    tables: Sequence[Table]
    notes: Sequence[str]
    content: Mapping[str, Any]
    draw: Callable[[pathlib.Path], None]

    @property
    def text(self) -> list[str]:
        """All paragraphs; the first has the versions and the machine."""
        versions = self.content["versions"].items()
        names = ", ".join(f"{name} {each}" for name, each in versions)
        return [f"{names}; {self.content['machine']}.", *self.notes]


@dataclasses.dataclass(frozen=True)
class Output:
    """The destinations of a report besides the terminal."""

    json: pathlib.Path | None = None
    plot: pathlib.Path | None = None
    markdown: bool = False
    # Takes the JSON in place of the terminal, which shows nothing then.
    print_json: Callable[[str], object] | None = None

    def publish(self, report: BenchReport) -> None:
        """Shows a report and writes its files."""
        text = json.dumps(report.content, indent=2)
        if self.print_json is not None:
            self.print_json(text)
        elif self.markdown:
            print(markdown_of(report))
        else:
            console = Console(highlight=False)
            for each in report.tables:
                console.print(each)
                console.print()
            for paragraph in report.text:
                console.print(paragraph, markup=False)
        if self.json is not None:
            self.json.write_text(text + "\n")
        if self.plot is not None:
            report.draw(self.plot)


def report_of(
    command: str,
    measured: Sequence[measure.Measurement],
    native: str,
    text: Sequence[str],
    **more: Any,
) -> BenchReport:
    """Returns the report of a command that compares times."""
    return BenchReport(
        tables=[ratio_table(measured), arm_table(measured)],
        notes=[f"Native: {native}", *text, meaning(measured[0].base)],
        content=header(command)
        | {"native": native, "settings": settings_json(measured)}
        | more,
        draw=lambda path: draw_ratios(path, measured),
    )


def markdown_of(report: BenchReport) -> str:
    """Returns a report as Markdown, to be pasted into a page."""
    parts = [markdown_table(each) for each in report.tables]
    parts += [textwrap.fill(paragraph, 80) for paragraph in report.text]
    return "\n\n".join(parts)


def markdown_table(shown: Table) -> str:
    heads, rows = tables.cells_of(shown)
    rules = [
        "---:" if column.justify == "right" else "---"
        for column in shown.columns
    ]
    lines = [[" ".join(head.split()) for head in heads], rules, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw_ratios(
    path: pathlib.Path, measurements: Sequence[measure.Measurement]
) -> None:
    """Draws a bar for each ratio, with its quartiles, by model and N."""
    rows = [each.comparisons() for each in measurements]
    names = list(dict.fromkeys(row.name for group in rows for row in group))
    labels = [
        f"{each.setting.size.name}\nN={each.setting.num_replicas}\n"
        f"A/A {each.noise.median:.2f}"
        for each in measurements
    ]
    figure, axes = _figure(len(labels) * len(names))
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        found = [
            (place, row.ratio)
            for place, group in enumerate(rows)
            for row in group
            if row.name == name
        ]
        places = [place + (index + 0.5) * width - 0.4 for place, _ in found]
        medians = [ratio.median for _, ratio in found]
        spread = [
            [ratio.median - ratio.low for _, ratio in found],
            [ratio.high - ratio.median for _, ratio in found],
        ]
        axes.bar(places, medians, width, yerr=spread, capsize=2, label=name)
    axes.axhspan(*measure.NOISE, color="grey", alpha=0.3)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylabel("time of a step, ratio (quartiles)")
    _save(figure, axes, path)


def draw_bytes(
    path: pathlib.Path, held: Mapping[str, Mapping[str, int]]
) -> None:
    """Draws a stacked bar for each arm, of the bytes on all devices."""
    devices = list(
        dict.fromkeys(name for each in held.values() for name in each)
    )
    figure, axes = _figure(2 * len(held))
    below = np.zeros(len(held))
    for device in devices:
        sizes = np.array([each.get(device, 0) / 1e6 for each in held.values()])
        axes.bar(range(len(held)), sizes, 0.6, bottom=below, label=device)
        below += sizes
    axes.set_xticks(
        range(len(held)), [name.replace(" ", "\n") for name in held]
    )
    axes.set_ylabel("held between steps, MB")
    _save(figure, axes, path)


def _figure(num_bars: int) -> tuple[Any, Any]:
    # Imported late, because it is an extra.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 1.5 + 0.4 * num_bars), 4.5))
    return figure, figure.add_subplot()


def _save(figure: Any, axes: Any, path: pathlib.Path) -> None:
    axes.set_title(f"keras_dist on {keras.backend.backend()}")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=120, bbox_inches="tight")

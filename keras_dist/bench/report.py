"""The output of a measurement: tables, sentences, JSON and a picture."""

import dataclasses
import os
import pathlib
import platform
from collections.abc import Mapping
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import keras
import numpy as np
from rich.table import Table

from keras_dist.bench import measure
from keras_dist.environment.packages import version_of
from keras_dist.planning import tables

Column = tuple[str, float, int]

# The heads of columns for `Measurement.counts`, with a unit and digits.
COLUMNS: dict[str, Column] = {
    "calls": ("Python calls", 1, 0),
    "collectives": ("Collectives", 1, 1),
    "planned_bytes": ("To send, kB", 1e3, 1),
}
NOTE = (
    "Keras: `fit` without a strategy, on the first device. Python calls are "
    "counted in the thread that trains. Collectives: on PyTorch, where "
    "replicas are threads, how often they wait for each other. To send: the "
    "bytes that `keras-dist plan` computes."
)


def header(command: str) -> dict[str, Any]:
    """Returns the first items of each command's JSON: versions, machine."""
    backend = keras.backend.backend()
    system = f"{platform.system()} {platform.machine()}"
    return {
        "command": command,
        "backend": backend,
        "versions": {
            backend: version_of(backend),
            "keras": keras.__version__,
            "keras-dist": version("keras-dist"),
            "python": platform.python_version(),
        },
        "machine": f"{system}, {os.cpu_count()} CPU cores",
    }


def as_json(measured: measure.Measurement) -> dict[str, Any]:
    """Returns a measurement for JSON; times are in seconds."""
    return dataclasses.asdict(measured) | {
        "noise": dataclasses.asdict(measured.noise),
        "comparisons": [
            dataclasses.asdict(row) for row in measured.comparisons()
        ],
    }


def report_of(
    head: dict[str, Any],
    measured: Sequence[measure.Measurement],
    *notes: str,
    columns: Mapping[str, Column] = COLUMNS,
) -> tables.TableReport:
    """Returns tables of all measurements, and what they mean."""
    least, most = measure.NOISE
    meaning = (
        "Ratios are medians of paired blocks, with quartiles. A/A is the arm "
        f"'{measured[0].base}' against a copy of itself. If that ratio is "
        f"outside of {least} to {most}, or its quartiles are more than "
        f"{measure.SPREAD} apart, the verdict is noise. With fewer than "
        f"{measure.LEAST_ROUNDS} rounds there is no verdict."
    )
    shown = [
        table
        for measurement in measured
        for table in (
            _ratio_table(measurement),
            _arm_table(measurement, columns),
        )
    ]
    return tables.TableReport("", shown, [machine_text(head), *notes, meaning])


def machine_text(head: dict[str, Any]) -> str:
    """Returns a sentence with the versions and the machine of a header."""
    versions = [f"{name} {number}" for name, number in head["versions"].items()]
    return f"{', '.join(versions)}; {head['machine']}."


def loss_notes(measured: measure.Measurement) -> list[str]:
    """Returns a note if the losses of arms differ that should not."""
    far = measured.far_losses()
    if not far:
        return []
    losses = {measured.base: measured.losses[measured.base], **far}
    text = ", ".join(f"{arm} {loss:.4f}" for arm, loss in losses.items())
    return [
        f"Losses after the first steps differ: {text}. The cause is a layer "
        "that draws random numbers, or a bug: see `keras-dist test --model`."
    ]


def _ratio_table(measurement: measure.Measurement) -> Table:
    """Returns a table with a row for each comparison."""
    devices = tables.names_text(measurement.devices)
    return tables.table(
        f"{measurement.model} on {devices}, {measurement.rows} rows: "
        "ratio of step times",
        ("Compared", tables.WORD),
        ("Ratio", tables.NUMBER),
        ("A/A", tables.NUMBER),
        ("Verdict", tables.WORD),
        rows=[
            (row.name, str(row.ratio), str(measurement.noise), row.verdict)
            for row in measurement.comparisons()
        ],
    )


def _arm_table(
    measurement: measure.Measurement, columns: Mapping[str, Column]
) -> Table:
    """Returns a table with each arm's time and counts."""
    shown = {
        name: columns[name] for name in columns if name in measurement.counts
    }
    return tables.table(
        "Of a step",
        ("Arm", tables.WORD),
        ("Time, ms", tables.NUMBER),
        *((head, tables.NUMBER) for head, _, _ in shown.values()),
        rows=[
            (
                arm,
                _text(float(np.median(times)), 1e-3, 3),
                *(
                    _text(measurement.counts[name].get(arm), unit, digits)
                    for name, (_, unit, digits) in shown.items()
                ),
            )
            for arm, times in measurement.times.items()
            if arm != measure.AGAIN
        ],
    )


def _text(number: float | None, unit: float, digits: int) -> str:
    return "not counted" if number is None else f"{number / unit:.{digits}f}"


def draw(path: pathlib.Path, measured: measure.Measurement) -> None:
    """Draws the time of a step in each block, a box for each arm."""
    # Imported late, because it is an extra.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.boxplot(
        [1e3 * np.asarray(times) for times in measured.times.values()],
        tick_labels=list(measured.times),
    )
    axes.set_ylabel("time of a step, ms")
    ratios = ", ".join(
        f"{row.name} {row.ratio}: {row.verdict}"
        for row in measured.comparisons()
    )
    axes.set_title(f"{measured.model} on {keras.backend.backend()}\n{ratios}")
    figure.savefig(path, dpi=120)

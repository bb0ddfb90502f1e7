"""Tables and JSON of what was measured."""

import dataclasses
import json
import os
import pathlib
import platform
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

from keras_dist.launch.bench.measure import Counts
from keras_dist.launch.bench.measure import Measurement
from keras_dist.launch.bench.portable import SCANNED_STEPS
from keras_dist.launch.bench.ratios import NOISE
from keras_dist.launch.bench.ratios import SPREAD


def versions() -> dict[str, str]:
    """Versions of what is measured."""
    backend = keras.backend.backend()
    return {
        backend: version(backend),
        "keras": keras.__version__,
        "keras-dist": version("keras-dist"),
        "python": platform.python_version(),
    }


def machine() -> str:
    """The machine, in words."""
    system = f"{platform.system()} {platform.machine()}"
    return f"{system}, {os.cpu_count()} CPU cores"


def show(
    console: Console, measurements: Sequence[Measurement[Counts]], native: str
) -> None:
    """Prints ratios, then times and counts, then what they are of.

    Args:
        console: The `rich` console to write to.
        measurements: Sequence of `Measurement`.
        native: String, what the native loop is.
    """
    console.print(ratio_table(measurements))
    console.print()
    console.print(detail_table(measurements))
    console.print()
    show_context(console, native)
    console.print(
        "Ours: `strategy.run` of a `keras_dist.function`. Reduced: and the "
        "loss reduced in each step. Ragged: with a row less, in shares of two "
        f"sizes. Scan: `scan_steps` of {SCANNED_STEPS}. Keras: a Keras model "
        "in the framework's own loop."
    )
    show_meaning(console)


def show_context(console: Console, native: str) -> None:
    """Prints what was measured where, and beside what."""
    names = ", ".join(f"{name} {each}" for name, each in versions().items())
    console.print(f"{names}; {machine()}.")
    console.print(f"Native: {native}")


def show_meaning(console: Console) -> None:
    """Prints what ratios and verdicts mean."""
    least, most = NOISE
    console.print(
        "Ratios are medians of paired blocks, with quartiles. A/A is the "
        f"native loop against a copy of itself: outside of {least} to {most}, "
        f"or with quartiles more than {SPREAD} apart, the verdict is noise."
    )


def ratio_table(measurements: Sequence[Measurement[Any]]) -> Table:
    """A row for each comparison."""
    table = Table(title="Time of a step, as a ratio", title_justify="left")
    for column in ("Model", "N", "Compared", "Ratio", "A/A", "Verdict"):
        table.add_column(column)
    for each in measurements:
        setting = each.setting
        for row in each.comparisons():
            table.add_row(
                setting.size.name,
                str(setting.num_replicas),
                row.name,
                str(row.ratio),
                str(each.noise),
                row.verdict,
            )
        table.add_section()
    return table


def detail_table(measurements: Sequence[Measurement[Counts]]) -> Table:
    """A row for each setting."""
    table = Table(title="Of our step and the native one", title_justify="left")
    for column in (
        "Model",
        "N",
        "Ours, ms",
        "Native, ms",
        "Python calls",
        "Native",
        "Traced again",
    ):
        table.add_column(column)
    for each in measurements:
        counts = each.counts
        table.add_row(
            each.setting.size.name,
            str(each.setting.num_replicas),
            f"{1e3 * np.median(each.times['ours']):.3f}",
            f"{1e3 * np.median(each.times['native']):.3f}",
            f"{counts.calls:.0f}",
            f"{counts.native_calls:.0f}",
            "not traced" if counts.traces is None else str(counts.traces),
        )
    return table


def as_json(
    measurements: Sequence[Measurement[Any]], native: str
) -> dict[str, Any]:
    """All that was measured, in types that JSON has.

    Args:
        measurements: Sequence of `Measurement`.
        native: String, what the native loop is.

    Returns:
        Dict with `"backend"`, `"versions"`, `"machine"`, `"native"` and
        `"settings"`, a list of dicts. Times there are in seconds.
    """
    return {
        "backend": keras.backend.backend(),
        "versions": versions(),
        "machine": machine(),
        "native": native,
        "settings": [
            {
                "model": each.setting.size.name,
                "replicas": each.setting.num_replicas,
                "devices": list(each.setting.devices),
                "rows": each.setting.size.rows,
                "widths": list(each.setting.size.widths),
                "steps": each.steps,
                "noise": dataclasses.asdict(each.noise),
                "comparisons": [
                    dataclasses.asdict(row) for row in each.comparisons()
                ],
                "counts": dataclasses.asdict(each.counts),
                "losses": each.losses,
                "times": each.times,
            }
            for each in measurements
        ],
    }


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Writes a file."""
    path.write_text(json.dumps(content, indent=2) + "\n")

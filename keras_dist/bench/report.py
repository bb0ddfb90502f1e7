"""Tables, JSON and sentences that all benchmarks share."""

import dataclasses
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import keras
import numpy as np
from rich.table import Table

from keras_dist.bench.measurement import AGAIN
from keras_dist.bench.measurement import Measurement
from keras_dist.bench.ratios import LEAST_ROUNDS
from keras_dist.bench.ratios import NOISE
from keras_dist.bench.ratios import SPREAD
from keras_dist.planning.tables import NUMBER
from keras_dist.planning.tables import WORD
from keras_dist.planning.tables import WORDS
from keras_dist.planning.tables import table


@dataclasses.dataclass(frozen=True)
class Column:
    """The format of a column of numbers.

    Numbers are divided by `unit` and have `digits` after the point; `missing`
    stands for a number that is not known.
    """

    head: str
    unit: float
    digits: int
    missing: str

    @property
    def lines(self) -> str:
        """The head, one word in a line: narrow enough for any terminal."""
        return self.head.replace(" ", "\n")

    def text(self, number: float | None) -> str:
        """Returns a number in the column's format."""
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


def versions() -> dict[str, str]:
    """Returns the versions of the backend, Keras, keras_dist and Python."""
    backend = keras.backend.backend()
    return {
        backend: version(backend),
        "keras": keras.__version__,
        "keras-dist": version("keras-dist"),
        "python": platform.python_version(),
    }


def machine() -> str:
    """Returns a description of the machine."""
    system = f"{platform.system()} {platform.machine()}"
    return f"{system}, {os.cpu_count()} CPU cores"


def where() -> str:
    """Returns a sentence with versions and the machine."""
    names = ", ".join(f"{name} {each}" for name, each in versions().items())
    return f"{names}; {machine()}."


def header(command: str) -> dict[str, Any]:
    """Returns the first items of each command's JSON."""
    return {
        "command": f"bench {command}",
        "backend": keras.backend.backend(),
        "versions": versions(),
        "machine": machine(),
    }


def meaning(base: str) -> str:
    """Returns an explanation of ratios and verdicts."""
    least, most = NOISE
    return (
        "Ratios are medians of paired blocks, with quartiles. A/A is "
        f"{base} against a copy of itself: outside of {least} to {most}, or "
        f"with quartiles more than {SPREAD} apart, the verdict is noise. "
        f"With fewer than {LEAST_ROUNDS} rounds there is none."
    )


def ratio_table(measurements: Sequence[Measurement]) -> Table:
    """Returns a table with a row for each comparison."""
    made = table(
        "Time of a step, as a ratio",
        ("Model", WORDS),
        ("N", NUMBER),
        ("Compared", WORD),
        ("Ratio", NUMBER),
        ("A/A", NUMBER),
        ("Verdict", WORD),
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


def arm_table(measurements: Sequence[Measurement]) -> Table:
    """Returns a table with each arm's time and counts."""
    counted = {name for each in measurements for name in each.counts}
    names = [name for name in COLUMNS if name in counted]
    made = table(
        "Of a step",
        ("Model", WORDS),
        ("N", NUMBER),
        ("Arm", WORD),
        (TIME.lines, NUMBER),
        *((COLUMNS[name].lines, NUMBER) for name in names),
    )
    for each in measurements:
        for arm in [arm for arm in each.times if arm != AGAIN]:
            made.add_row(
                each.setting.size.name,
                str(each.setting.num_replicas),
                arm,
                TIME.text(float(np.median(each.times[arm]))),
                *(_cell(each, name, arm) for name in names),
            )
        made.add_section()
    return made


def _cell(each: Measurement, name: str, arm: str) -> str:
    numbers = each.counts.get(name, {})
    return COLUMNS[name].text(numbers[arm]) if arm in numbers else ""


def settings_json(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Returns all measurements in types that JSON has; times are in seconds."""
    return [
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
            "counts": {name: dict(one) for name, one in each.counts.items()},
            "losses": dict(each.losses),
            "times": dict(each.times),
        }
        for each in measurements
    ]

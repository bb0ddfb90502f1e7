"""Tables and JSON of what workers have measured."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from keras_dist.launch.bench.measure import Measurement
from keras_dist.launch.bench.report import as_json
from keras_dist.launch.bench.report import ratio_table
from keras_dist.launch.bench.report import show_context
from keras_dist.launch.bench.report import show_meaning
from keras_dist.launch.bench.worker_measure import ALONE
from keras_dist.launch.bench.worker_measure import Result
from keras_dist.launch.bench.worker_measure import Traffic


def load() -> list[float] | None:
    """The machine's mean numbers of busy processes, of 1, 5 and 15 minutes."""
    return list(os.getloadavg()) if hasattr(os, "getloadavg") else None


def show_workers(
    console: Console, result: Result, before: list[float] | None
) -> None:
    """Prints ratios, then times and traffic, then what they are of.

    Args:
        console: The `rich` console to write to.
        result: `Result`.
        before: What `load` said before the workers were started.
    """
    console.print(ratio_table(result.measured))
    console.print()
    console.print(traffic_table(result.measured))
    console.print()
    show_context(console, result.native_text)
    if before is not None:
        console.print(
            f"Load: {before[0]:.2f} in the minute before; the workers add "
            "theirs. With other programs at work, ratios are those of waiting."
        )
    console.print(
        "N: workers, all on this machine's CPUs. Ours: `train_on_batch`, "
        "the step of `fit`, under `MultiWorkerMirroredStrategy`, each worker "
        "given the global batch. Run: `strategy.run` of a "
        "`keras_dist.function`, with batches cut before. Keras: "
        "`train_on_batch` without a strategy, of a worker's rows: no worker "
        "waits for another."
    )
    console.print(
        "Sent: by the first worker over TCP; least: what an all-reduce of the "
        "gradients has to send."
    )
    show_meaning(console)


def traffic_table(measurements: Sequence[Measurement[Traffic]]) -> Table:
    """A row for each arm."""
    table = Table(title="Of a step", title_justify="left")
    for column in (
        "Model",
        "N",
        "Arm",
        "Time, ms",
        "Collectives",
        "Sent, kB",
        "Least, kB",
    ):
        table.add_column(column)
    for each in measurements:
        counts = each.counts
        for arm in [arm for arm in each.times if arm != "again"]:
            least = 0.0 if arm == ALONE else counts.least_bytes
            table.add_row(
                each.setting.size.name,
                str(each.setting.num_replicas),
                arm,
                f"{1e3 * np.median(each.times[arm]):.3f}",
                _shown(counts.collectives[arm], 1, 1),
                _shown(counts.bytes_sent[arm], 1e3, 1),
                _shown(least, 1e3, 1),
            )
        table.add_section()
    return table


def workers_json(result: Result, before: list[float] | None) -> dict[str, Any]:
    """All that was measured, in types that JSON has.

    Args:
        result: `Result`.
        before: What `load` said before the workers were started.

    Returns:
        Dict as of `bench loops`, with `"load"`.
    """
    return as_json(result.measured, result.native_text) | {"load": before}


def _shown(number: float | None, unit: float, digits: int) -> str:
    return "unknown" if number is None else f"{number / unit:.{digits}f}"

"""Pictures of measurements, drawn without a display."""

import pathlib
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_dist.bench.measurement import Measurement
from keras_dist.bench.ratios import NOISE


def draw_ratios(
    path: pathlib.Path, measurements: Sequence[Measurement]
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
    axes.axhspan(*NOISE, color="grey", alpha=0.3)
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

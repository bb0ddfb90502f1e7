"""Pictures of what each device holds, in one look; they need matplotlib.

Each device has a line. The whole line is what there is to hold: the rows of a
batch, or the bytes of a model. The device holds the coloured parts of it.
"""

import io
import math
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

try:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError(
        "A picture needs matplotlib, which is not installed. Run "
        '`pip install "keras-dist[plot]"`.'
    ) from error

# Of matplotlib's style "petroff10", whose colours people tell apart who confuse
# some (Petroff, 2021, "Accessible color sequences for data visualization").
BLUE, ORANGE, PALE_BLUE, GRAY = "#3F90DA", "#FFA90E", "#92DADD", "#717581"
PURPLE, BROWN = "#832DB6", "#A96B59"
_ELSEWHERE = "#EBEBEB"
_THICKNESS = 0.72
# If there are more lines, only some of them have names.
_MOST_NAMES = 40
# If there are more rows, borders and numbers of single rows are left out.
_MOST_CELLS = 20
_LEAST_SHARE_WITH_TEXT = 0.1


@dataclass(frozen=True)
class HeldPart:
    """A part of a line, which the line's device holds.

    Args:
        start: Float, where it begins.
        length: Float, how long it is.
        color: String, one of the colours of this module.
        label: String, what the legend calls it; empty for nothing.
        text: String, what is written on it, if it is long enough.
    """

    start: float
    length: float
    color: str
    label: str = ""
    text: str = ""


@dataclass(frozen=True)
class Line:
    """The line of a device.

    Args:
        name: String, what stands on its left.
        parts: Tuple of `HeldPart`s, what the device holds.
        total: String, what stands on its right.
    """

    name: str
    parts: tuple[HeldPart, ...]
    total: str


class Picture(Figure):
    """A figure that notebooks show, though pyplot does not know it."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def draw_rows(
    lines: Sequence[Line], num_rows: int, title: str, axes: Any = None
) -> Any:
    """Draws a line for each replica, as long as a batch.

    Args:
        lines: Sequence of `Line`s, from top to bottom.
        num_rows: Integer, number of rows of the batch.
        title: String, left out if there are `axes`.
        axes: Axes of matplotlib, or `None` for those of a new figure.

    Returns:
        The figure.
    """
    on = _new_axes(title, len(lines)) if axes is None else axes
    has_cells = num_rows <= _MOST_CELLS
    _draw_lines(on, lines, num_rows, has_texts=not has_cells)
    on.set_xlabel("row of the global batch")
    if has_cells:
        on.vlines(range(1, num_rows), *on.get_ylim(), "white", lw=1.2)
        numbers = range(num_rows)
        on.set_xticks([0.5 + number for number in numbers], list(numbers))
        on.tick_params(bottom=False)
    return _finished(on, axes is None)


def draw_bytes(
    lines: Sequence[Line],
    num_bytes: int,
    title: str,
    text_of: Callable[[int], str],
    axes: Any = None,
) -> Any:
    """Draws a line for each device, as long as all variables of a model.

    Args:
        lines: Sequence of `Line`s, from top to bottom.
        num_bytes: Integer, bytes of one copy of all variables.
        title: String, left out if there are `axes`, and so is the legend.
        text_of: Function that returns a number of bytes as a text.
        axes: Axes of matplotlib, or `None` for those of a new figure.

    Returns:
        The figure.
    """
    on = _new_axes(title, len(lines)) if axes is None else axes
    _draw_lines(on, lines, num_bytes)
    on.set_xlabel("all variables of the model")
    on.xaxis.set_major_formatter(lambda number, _: text_of(round(number)))
    return _finished(on, axes is None)


def _new_axes(title: str, num_lines: int) -> Any:
    height = min(1.2 + 0.34 * num_lines, 14.0)
    figure = Picture(figsize=(8, height), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left")
    return axes


def _finished(axes: Any, is_new: bool) -> Any:
    if is_new and axes.get_legend_handles_labels()[1]:
        axes.figure.legend(loc="outside lower left", ncols=4, frameon=False)
    return axes.figure


def _draw_lines(
    axes: Any, lines: Sequence[Line], whole: int, has_texts: bool = True
) -> None:
    whole = max(whole, 1)
    places = range(len(lines))
    axes.barh(places, whole, _THICKNESS, color=_ELSEWHERE)
    labels = set()
    for place, line in enumerate(lines):
        for part in line.parts:
            bar = axes.barh(
                place, part.length, _THICKNESS, part.start, color=part.color
            )
            if part.label and part.label not in labels:
                labels.add(part.label)
                bar.set_label(part.label)
            if has_texts and part.length >= _LEAST_SHARE_WITH_TEXT * whole:
                axes.bar_label(
                    bar, [part.text], label_type="center", color="white"
                )
    step = math.ceil(len(lines) / _MOST_NAMES) or 1
    named = places[::step]
    axes.set_yticks(named, [lines[place].name for place in named])
    for place in named:
        axes.annotate(
            lines[place].total,
            (whole, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            annotation_clip=False,
        )
    axes.set_xlim(0, whole)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.spines[:].set_visible(False)
    axes.tick_params(left=False)

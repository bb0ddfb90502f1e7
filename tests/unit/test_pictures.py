"""`.plot()` draws the rows of replicas, and the bytes of devices."""

import sys

import keras
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import keras_dist
from inputs.helpers import strategy_of
from keras_dist.inputs.explain import Explanation
from keras_dist.inputs.explain import ReplicaRows
from keras_dist.planning import pictures
from keras_dist.tools.counting import VariableRow
from keras_dist.tools.summary import Summary

PURPLE, BLUE, ORANGE = (
    color.lower() for color in (pictures.PURPLE, pictures.BLUE, pictures.ORANGE)
)
ON = tuple(f"cpu:{index}" for index in range(4))


def bars(axes, color):
    """The bars of a colour: their line, where they begin, how long they are."""
    found = [p for p in axes.patches if to_hex(p.get_facecolor()) == color]
    lines = [round(bar.get_y() + bar.get_height() / 2) for bar in found]
    widths = [(bar.get_x(), bar.get_width()) for bar in found]
    return [(line, *each) for line, each in zip(lines, widths, strict=True)]


def names(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def texts(axes):
    return [text.get_text() for text in axes.texts if text.get_text()]


def row_of(group, num_bytes, kind, kept):
    return VariableRow(
        group, group, (num_bytes // 4,), "float32", kind, num_bytes, kept
    )


def summary_of(*rows, on=ON):
    return Summary("net", "", rows, on, (), ())


def test_each_replica_has_a_line_with_its_rows():
    explanation = strategy_of(4).explain([(np.ones((10, 2)),)])
    figure = explanation.plot()
    (axes,) = figure.axes
    assert isinstance(figure, Figure)
    assert names(axes) == [f"replica {i}, cpu:{i}" for i in range(4)]
    assert bars(axes, PURPLE) == [
        (row.replica, row.first, row.num_rows) for row in explanation
    ]
    assert texts(axes) == ["3 rows", "2 rows", "3 rows", "2 rows"]
    ticks = [each.get_text() for each in axes.get_xticklabels()]
    assert ticks == [*map(str, range(10))]
    assert figure.legends == []
    # What a notebook shows, without pyplot.
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_long_short_and_empty_batches():
    axes = strategy_of(4).explain(np.ones((100, 2))).plot().axes[0]
    assert texts(axes)[:2] == ["0 to 24", "25 to 49"]
    assert len(axes.collections) == 0  # no borders
    axes = strategy_of(4).explain([(np.ones((2, 2)),)]).plot().axes[0]
    assert len(names(axes)) == 4
    assert len(bars(axes, PURPLE)) == 2
    assert texts(axes).count("0 rows") == 2
    rows = (ReplicaRows(0, 0, "cpu:0", range(0), None),)
    assert texts(Explanation("", "fit", rows, 0).plot().axes[0]) == ["0 rows"]


def test_workers_have_names_and_colors():
    rows = tuple(
        ReplicaRows(i // 2, i, None if i < 2 else f"cpu:{i - 2}", part, None)
        for i, part in enumerate([range(3), range(3, 5), range(5, 7), range(0)])
    )
    axes = Explanation("<strategy>", "fit", rows, 7).plot().axes[0]
    assert names(axes) == [
        *("worker 0, replica 0", "worker 0, replica 1"),
        *("worker 1, replica 2, cpu:0", "worker 1, replica 3, cpu:1"),
    ]
    assert [line for line, _, _ in bars(axes, PURPLE)] == [0, 1]
    assert bars(axes, pictures.BROWN.lower()) == [(2, 5, 2)]


def test_of_many_replicas_some_have_names():
    rows = tuple(
        ReplicaRows(0, i, f"gpu:{i}", range(i, i + 1), None) for i in range(100)
    )
    figure = Explanation("", "fit", rows, 100).plot()
    assert len(bars(figure.axes[0], PURPLE)) == 100
    assert names(figure.axes[0])[:2] == ["replica 0, gpu:0", "replica 3, gpu:3"]
    assert len(names(figure.axes[0])) == 34
    assert figure.get_size_inches()[1] <= 14


def test_copies_are_whole_on_each_device():
    found = summary_of(
        row_of("trainable", 400, "mirrored", tuple((d, 400) for d in ON)),
        row_of("optimizer", 800, "mirrored", tuple((d, 800) for d in ON)),
    )
    figure = found.plot()
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "What each device keeps of 'net'"
    assert names(axes) == list(ON)
    assert bars(axes, BLUE) == [(i, 0, 400) for i in range(4)]
    assert bars(axes, ORANGE) == [(i, 400, 800) for i in range(4)]
    assert texts(axes) == ["1.2 kB"] * 4
    (legend,) = figure.legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert shown == ["weights", "optimizer's state"]


@pytest.mark.parametrize(
    ("num_bytes", "part", "expected"),
    [
        (400, 100, [(0, 0, 100), (1, 100, 100), (2, 200, 100), (3, 300, 100)]),
        # The last part is drawn without its padding.
        (40, 12, [(0, 0, 12), (1, 10, 12), (2, 20, 12), (3, 30, 10)]),
        # Each copy in parts begins at the start.
        (400, 200, [(0, 0, 200), (1, 200, 200), (2, 0, 200), (3, 200, 200)]),
    ],
)
def test_parts_follow_each_other(num_bytes, part, expected):
    copies = tuple((device, 40) for device in ON)
    parts = tuple((device, part) for device in ON)
    found = summary_of(
        row_of("trainable", num_bytes, "sharded", parts),
        row_of("trainable", 40, "mirrored", copies),
    )
    drawn = bars(found.plot().axes[0], BLUE)
    moved = [(line, 40 + start, length) for line, start, length in expected]
    assert sorted(drawn) == sorted([*moved, *((i, 0, 40) for i in range(4))])


def test_central_variables_are_on_their_device_only():
    found = summary_of(
        row_of("trainable", 400, "central", (("cpu:2", 400),)),
        row_of("optimizer", 800, "central", (("cpu:3", 800),)),
    )
    axes = found.plot().axes[0]
    assert bars(axes, BLUE) == [(2, 0, 400)]
    assert bars(axes, ORANGE) == [(3, 400, 800)]
    assert texts(axes) == ["0 B", "0 B", "400 B", "800 B"]


def test_a_small_group_is_not_in_the_legend():
    found = summary_of(
        row_of("trainable", 4000, "plain", (("cpu:0", 4000),)),
        row_of("metrics", 8, "plain", (("cpu:0", 8),)),
        on=("cpu:0",),
    )
    axes = found.plot().axes[0]
    assert bars(axes, pictures.GRAY.lower()) == [(0, 4000, 8)]
    assert axes.get_legend_handles_labels()[1] == ["weights"]


def built(strategy):
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(64, use_bias=False)]
        )
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    return keras_dist.summary(model)


@pytest.mark.only_on("jax", reason="Others shard nothing in one process.")
def test_a_sharded_optimizer_state_is_drawn_in_parts():
    strategy = keras_dist.MirroredStrategy(
        ["cpu:0", "cpu:1"], optimizer_state="sharded"
    )
    found = built(strategy)
    axes = found.plot().axes[0]
    kernel = 64 * 64 * 4
    assert [bar[1:] for bar in bars(axes, BLUE)] == [(0, kernel)] * 2
    large = [bar for bar in bars(axes, ORANGE) if bar[2] > 100]
    first, second = large
    assert first[2] == second[2] == kernel
    assert second[1] == first[1] + kernel


def test_given_axes_get_neither_a_title_nor_a_legend():
    figure = Figure()
    left, right = figure.subplots(1, 2)
    explanation = strategy_of(2).explain(np.ones((4, 1)))
    assert explanation.plot(left) is figure
    assert built(strategy_of(2)).plot(axes=right) is figure
    for axes in (left, right):
        assert axes.get_title() == axes.get_title(loc="left") == ""
        assert axes.get_legend() is None
    assert figure.legends == []
    labels = right.get_legend_handles_labels()[1]
    assert labels == ["weights", "optimizer's state"]


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    explanation = strategy_of(2).explain(np.ones((4, 1)))
    found = built(strategy_of(2))
    for module in (
        "keras_dist.planning.pictures",
        "keras_dist.tools.summary_picture",
    ):
        monkeypatch.delattr(module, raising=False)
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for what in (explanation, found):
        with pytest.raises(ImportError, match=r'"keras-dist\[plot\]"'):
            what.plot()

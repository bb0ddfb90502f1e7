"""`keras_dist.summary` in a terminal and in a notebook."""

import dataclasses

import keras
import numpy as np

import keras_dist
from keras_dist.tools.counting import VariableRow
from keras_dist.tools.summary import Summary


def trained(strategy=None):
    """A model after a step, with variables of each kind and no seeds."""
    with (strategy or keras_dist.get_strategy()).scope():
        model = keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.Dense(7, name="first"),
                keras.layers.BatchNormalization(name="norm"),
                keras.layers.Dense(3, name="second"),
            ],
            name="net",
        )
        model.compile("adam", "mse", metrics=["mae"])
    model.fit(np.ones((8, 5)), np.ones((8, 3)), batch_size=8, verbose=0)
    return model


def mirrored(count):
    return keras_dist.MirroredStrategy([f"cpu:{i}" for i in range(count)])


def test_it_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = str(keras_dist.summary(trained(mirrored(4))))
    assert max(map(len, text.splitlines())) <= 80
    for part in (
        "'net'",
        "MirroredStrategy",
        "net/first/kernel",
        "cpu:0-3",
        "140 B",
        "Each device keeps",
        "all-reduce",
    ):
        assert part in text
    assert "\x1b" not in text


def test_show_print_and_notebooks_show_the_same(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    found = keras_dist.summary(trained())
    text = str(found)
    found.show()
    shown = capsys.readouterr().out
    assert [line.rstrip() for line in shown.rstrip().splitlines()] == [
        line.rstrip() for line in text.splitlines()
    ]
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(found) == text
    assert repr(found) == "<Summary of 'net': 26 variables on cpu:0>"


def test_large_models_are_cut_and_counted_all_the_same():
    model = trained()
    cut = keras_dist.summary(model, max_rows=8)
    whole = keras_dist.summary(model, max_rows=None)
    assert cut.rows == whole.rows and cut.devices == whole.devices
    shown = sum(len(shown) for _, shown, _ in cut.shown_rows())
    hidden = sum(len(hidden) for _, _, hidden in cut.shown_rows())
    assert (shown, shown + hidden) == (8, len(whole.rows))
    assert "and 12 more" in str(cut)
    assert "more" not in str(whole).split("Each device")[0]
    none = keras_dist.summary(model, 0)
    assert not any(shown for _, shown, _ in none.shown_rows())
    for group, _, hidden in none.shown_rows():
        assert f"{len(hidden)} variables" in str(none), group
    # A group that needs less leaves it to others.
    cut = keras_dist.summary(model, max_rows=20)
    shown = {group: len(shown) for group, shown, _ in cut.shown_rows()}
    assert shown == {
        "trainable": 6,
        "non-trainable": 2,
        "optimizer": 8,
        "metrics": 4,
    }


def in_notebook(found):
    return found._repr_mimebundle_((), ())["text/html"]


def test_notebooks_show_tables():
    text = in_notebook(keras_dist.summary(trained(mirrored(2))))
    assert "net/first/kernel" in text and "cpu:0-1" in text


def test_notebooks_show_names_as_they_are():
    row = VariableRow("trainable", "<b>&", (1,), "float32", "plain", 4, ())
    found = Summary("<i>", "", (row,), ("cpu:0",), (), ("a < b",))
    text = in_notebook(found)
    for part in ("&lt;b&gt;&amp;", "&lt;i&gt;", "a &lt; b"):
        assert part in text
    assert "<b>" not in text
    assert "[bold]" in str(dataclasses.replace(found, model="[bold]"))


def test_the_short_form_is_short():
    found = keras_dist.summary(trained())
    assert repr(found) == "<Summary of 'net': 26 variables on cpu:0>"

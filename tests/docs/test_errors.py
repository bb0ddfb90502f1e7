"""The page about errors: its examples fail and work as they say."""

import contextlib
import pathlib
import re

import keras
import numpy as np
import pytest

import keras_dist
from keras_dist import errors
from keras_dist.cli.explain import sections
from parity.harness import BACKEND
from tables import NAMES

SECTIONS = sections()
ERRORS = [
    getattr(errors, name) for name in errors.__all__ if name != "KerasDistError"
]


@pytest.mark.parametrize("error", ERRORS)
def test_each_error_has_a_section_and_says_so(error):
    assert f"`{error.__name__}`" in SECTIONS[error.section]
    hint = errors.see_section(error.section)
    assert hint.startswith("See https://")
    assert " or run: keras-dist explain " in hint
    assert str(error("What happened.")) == f"What happened. {hint}"
    again = error(str(error("What happened.")))
    assert str(again).count(hint) == 1
    assert str(error()) == ""


def test_each_warning_names_a_section_that_exists():
    # The source's, as an installed package has the backends beside it.
    top = pathlib.Path(__file__).parents[2]
    texts = [
        path.read_text()
        for folder in ("keras_dist", "backends")
        for path in (top / folder).rglob("*.py")
    ]
    named = re.findall(r"see_section\(['\"](.+?)['\"]\)", "".join(texts))
    assert len(named) >= 4
    assert set(named) <= set(SECTIONS)


@pytest.mark.parametrize("error", ERRORS)
def test_each_error_says_its_fix(error):
    assert "Fix:" in error.__doc__


@pytest.mark.parametrize("section", SECTIONS)
def test_the_examples_do_what_they_say(section):
    names = {
        "keras": keras,
        "keras_dist": keras_dist,
        "np": np,
        "strategy": keras_dist.MirroredStrategy(["cpu:0", "cpu:1"]),
    }
    blocks = re.findall(r"```python\n(.*?)```", SECTIONS[section], re.DOTALL)
    for block in blocks:
        with _raises(block):
            exec(block, names)


def _raises(block):
    (says,) = re.findall(r"# raises (.*)", block) or [""]
    for name, backends in re.findall(r"(\w+)(?: on ([^;]*))?", says):
        if not backends or NAMES[BACKEND] in backends:
            error = getattr(keras_dist, name)
            hint = re.escape(errors.see_section(error.section))
            return pytest.raises(error, match=hint)
    return contextlib.nullcontext()

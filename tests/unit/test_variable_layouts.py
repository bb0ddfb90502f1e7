"""`layout_map` divides the variables that the map of Keras would."""

import keras
import pytest

from keras_dist.core.variable_layouts import parse_layouts

pytestmark = pytest.mark.runs_on("torch")
LAYOUTS = {
    r".*up/kernel": (None, "logical"),
    r".*down/kernel": ["logical"],
    r".*norm/.*": (None,),
}


@pytest.mark.parametrize(
    ("path", "shape", "expected"),
    [
        ("up/kernel", (3, 8), (None, "logical")),
        ("block/up/kernel", (3, 8), (None, "logical")),
        ("block/up/kernel_lora", (3, 8), ()),
        ("down/kernel", (8, 3), ("logical",)),
        ("norm/gamma", (3,), ()),
        ("other", (3,), ()),
    ],
)
def test_a_pattern_matches_the_whole_path(path, shape, expected):
    layouts = parse_layouts(LAYOUTS, 4)
    assert layouts.axes_of(path, shape) == expected
    # The map of Keras finds the same.
    theirs = keras.distribution.LayoutMap(None)
    for pattern, axes in LAYOUTS.items():
        theirs[pattern] = tuple(axes)
    assert parse_layouts(theirs, 4) == layouts
    found = theirs[path]
    axes = () if found is None else found.axes
    assert expected == (axes if "logical" in axes else ())


def test_a_whole_path_comes_before_patterns():
    layouts = parse_layouts(
        {".*/kernel": (None, "logical"), "a/kernel": ("logical",)}, 2
    )
    assert layouts.axes_of("a/kernel", (2, 2)) == ("logical",)
    assert layouts.axes_of("b/kernel", (2, 2)) == (None, "logical")
    assert layouts.matching("a/kernel") == ["a/kernel"]


def test_patterns_that_agree():
    layouts = parse_layouts({"a.*": ("logical",), ".*b": ("logical",)}, 2)
    assert layouts.axes_of("ab", (2,)) == ("logical",)
    assert layouts.matching("ab") == ["a.*", ".*b"]
    layouts.check_used({"a.*", ".*b"})


@pytest.mark.parametrize(
    ("layout_map", "kind", "message"),
    [
        ([], TypeError, "of type list"),
        ({3: ("logical",)}, TypeError, "3 of type int"),
        ({"(": ("logical",)}, ValueError, "no regular expression"),
        ({"a": "logical"}, TypeError, "must be a tuple.*'logical'"),
        ({"a": None}, TypeError, "must be a tuple"),
        ({"a": (None, "model")}, ValueError, "names 'model'.*'logical'"),
        ({"a": ("replica",)}, ValueError, "names 'replica'"),
        ({"a": ("logical", "logical")}, ValueError, "more than once"),
    ],
)
def test_maps_that_are_none(layout_map, kind, message):
    with pytest.raises(kind, match=message):
        parse_layouts(layout_map, 2)

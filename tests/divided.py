"""The tests that one run of CI leaves to the runs of other backends.

`python -m runs` sets TESTS_DIVIDED. Whoever starts pytest gets every test.
PyTorch, which compiles nothing, is quick and runs all cases of a test. JAX and
TensorFlow each run about a third of them, and not the same third. Tests that
are processes take as long on each backend: there PyTorch runs the last third.
"""

import os
import zlib

import keras

from runs.runs import PROGRAMS

IS_DIVIDED = os.environ.get("TESTS_DIVIDED") == "1"
BACKEND = keras.backend.backend()
SHARES = ("jax", "tensorflow", "torch")


def divide(config, items):
    """Deselects what is left to others."""
    if not IS_DIVIDED:
        return
    marks = [item.get_closest_marker("once") for item in items]
    divided = [
        item
        for item, mark in zip(items, marks, strict=True)
        if not mark and _is_divided(item)
    ]
    left_out = set(divided) - _share(divided, SHARES.index(BACKEND))
    for item, mark in zip(items, marks, strict=True):
        if mark and BACKEND not in mark.args:
            left_out.add(item)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _is_divided(item):
    """Whether other backends run cases of this test for this one."""
    if BACKEND == "torch":
        return not {*PROGRAMS}.isdisjoint(item.path.parts)
    return "backends" not in item.path.parts


def _share(items, number):
    """The set of those items that a run keeps: some cases of each test."""
    tests = {}
    for item in items:
        test = (item.path, item.cls, item.originalname)
        tests.setdefault(test, []).append(item)
    shared = set()
    for (path, _, name), cases in tests.items():
        # Tests begin with different cases, the same ones in every run.
        begin = number + zlib.crc32(f"{path.name}::{name}".encode())
        diagonals = [sum(place) + begin for place in _places(cases)]
        wanted = [
            case
            for case, each in zip(cases, diagonals, strict=True)
            if each % len(SHARES) == 0
        ]
        shared.update(wanted or [cases[begin % len(cases)]])
    return shared


def _places(cases):
    """The place of each case of one test in the grid of its parameters.

    Cases on one diagonal of it have each value of a parameter beside others.
    """
    seen, places = {}, []
    for case in cases:
        place = []
        for names, values in _parameters(case).items():
            known = seen.setdefault(names, {})
            place.append(known.setdefault(values, len(known)))
        places.append(place)
    return places


def _parameters(case):
    """What it is called with: names that go together, and their values."""
    callspec = getattr(case, "callspec", None)
    left = {} if callspec is None else dict(callspec.params)
    parameters = {}
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        if isinstance(names, str):
            names = [name.strip() for name in names.split(",") if name.strip()]
        together = tuple(name for name in names if name in left)
        parameters[together] = tuple(id(left.pop(name)) for name in together)
    return parameters | {(name,): (id(left[name]),) for name in left}

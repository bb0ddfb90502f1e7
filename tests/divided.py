"""The tests that one run of CI leaves to the runs of other backends.

`python -m runs` sets TESTS_DIVIDED. Whoever starts pytest gets every test.
"""

import os
import zlib

import keras

from runs.runs import PROGRAMS

IS_DIVIDED = os.environ.get("TESTS_DIVIDED") == "1"
BACKEND = keras.backend.backend()
SHARING = ("jax", "tensorflow", "torch")


def divide(config, items):
    """Deselects what is left to others."""
    if not IS_DIVIDED:
        return
    tests, left_out = {}, set()
    for item in items:
        mark = item.get_closest_marker("runs_on")
        if mark is None and _is_for_some(item):
            continue
        if mark is None:
            test = (item.path, item.cls, item.originalname)
            tests.setdefault(test, []).append(item)
        elif BACKEND not in mark.args:
            left_out.add(item)
    # The smoke tests are few, and each backend runs them on the oldest Keras.
    if config.option.markexpr != "smoke":
        for cases in tests.values():
            left_out |= set(cases) - set(share(cases, BACKEND))
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _is_for_some(item):
    """Whether there may be no other backend that can run an item."""
    callspec = getattr(item, "callspec", None)
    return bool(item.get_closest_marker("skipif")) or (
        callspec is not None
        and (
            # What tests tf.distribute itself.
            "native" in callspec.id.split("-")
            or any(
                len(getattr(value, "backends", SHARING)) < len(SHARING)
                for value in callspec.params.values()
            )
        )
    )


def share(cases, backend):
    """The cases of one test that a backend's run keeps.

    A case that starts processes takes long on each backend, and one of them
    runs it. PyTorch compiles nothing and runs all other cases. JAX runs a third
    of them too, and TensorFlow another third. If there are only one or two
    cases, JAX or TensorFlow runs each. Of a grid of its own cases, a backend
    runs every other one. One run alone has the tests of all backends together.
    """
    path, name = cases[0].path, cases[0].originalname
    if "cross" in path.parts:
        return cases
    # Tests begin with different backends, the same ones in every run.
    begin = zlib.crc32(f"{path.name}::{name}".encode())
    if not {*PROGRAMS}.isdisjoint(path.parts):
        # By name, as not every backend has each case.
        return [
            case
            for case in cases
            if SHARING[zlib.crc32(case.name.encode()) % 3] == backend
        ]
    places = _places(cases)
    if "backends" in path.parts:
        is_grid = (
            sum(len(set(each)) > 1 for each in zip(*places, strict=True)) > 1
        )
        number, count = begin, 2 if is_grid else 1
    elif backend == "torch":
        return cases
    else:
        number, count = SHARING.index(backend), min(3, max(2, len(cases)))
    return [
        case
        for case, place in zip(cases, places, strict=True)
        if (sum(place) + begin - number) % count == 0
    ]


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

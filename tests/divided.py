"""The tests that one run of CI leaves to the runs of other backends.

`python -m runs` sets TESTS_DIVIDED to `one`: this run leaves them out, and
those marked as nightly. With `all`, only those are left out that every backend
leaves out. Whoever starts pytest gets every test.
"""

import itertools
import operator
import os
import zlib

import keras

from runs.runs import PROGRAMS

BACKEND = keras.backend.backend()
# A backend that is written with stable names only, on PyTorch.
IS_FOURTH = bool(os.environ.get("KERAS_DIST_FOURTH"))
SHARING = ("jax", "tensorflow", "torch")
TOGETHER = {"one": (BACKEND,), "all": SHARING}
# Folders of tests that read each page and example.
TEXTS = ("docs", "tutorials")
# Of these folders, JAX and TensorFlow run one case of so many: tests of the
# contract take a twentieth of a second, but for those of training in `run`.
SHORT = {"conformance": 1, "functions": 3}
LONG = "_in_run"
# A place further in one parameter is so many in the other ones. None is a
# multiple of 3, so that each value of a parameter can be kept.
STEPS = (1, 4, 7, 2, 5, 8)
# TensorFlow takes twice as long as JAX to start.
RUNNING = (*["torch"] * 4, "jax", "tensorflow")


def divide(config, items):
    """Deselects what is left to others."""
    chosen = os.environ.get("TESTS_DIVIDED")
    if not chosen:
        return
    backends = TOGETHER[chosen]
    tests, left_out = {}, set()
    for item in items:
        if chosen == "one" and item.get_closest_marker("nightly"):
            left_out.add(item)
            continue
        mark = item.get_closest_marker("runs_on")
        if mark is None and _may_be_skipped(item):
            continue
        if mark is None:
            kept = share_of_some if _is_for_some(item) else share
            test = (kept, item.path, item.cls, item.originalname)
            tests.setdefault(test, []).append(item)
        elif not {*mark.args} & {*backends}:
            left_out.add(item)
    is_smoke = config.option.markexpr == "smoke"
    for (kept, *_), cases in tests.items():
        if is_smoke:
            kept = share_of_smoke if kept is share else lambda all_, _: all_
        left_out |= set(cases).difference(*(kept(cases, b) for b in backends))
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _may_be_skipped(item):
    """Whether it depends on more than the backend if an item is skipped."""
    callspec = getattr(item, "callspec", None)
    # The last is what tests tf.distribute itself.
    return item.get_closest_marker("skipif") or (
        callspec is not None and "native" in callspec.id.split("-")
    )


def _is_for_some(item):
    """Whether PyTorch, which runs all cases, can't run an item."""
    only = [mark.args for mark in item.iter_markers("only_on")]
    callspec = getattr(item, "callspec", None)
    if callspec is not None:
        values = callspec.params.values()
        only += [getattr(value, "backends", SHARING) for value in values]
    return any("torch" not in backends for backends in only)


def share_of_smoke(cases, backend):
    """The smoke tests that a backend runs on the oldest Keras."""
    number = SHARING.index(backend)
    return [
        case
        for case in cases
        if backend == "torch" or _number(case.name) % 3 == number
    ]


def share_of_some(cases, backend):
    """Of a test that PyTorch can't run, a third of the cases if it has many."""
    return _every(3 if len(cases) > 2 else 1, cases, backend)


def share(cases, backend):
    """The cases of one test that a backend's run keeps.

    Every other case that starts processes is run by one of the backends, by
    PyTorch most often: it compiles nothing, and takes a tenth of the others'
    time. It runs all other cases too. JAX runs a ninth of them, TensorFlow
    another ninth, and more of those that are short. Of a grid of its own
    cases, a backend runs a third. One run alone has the tests of all backends
    together.
    """
    path = cases[0].path
    # The checkout may lie in a folder of any name.
    folders = path.parts[-path.parts[::-1].index("tests") :]
    if folders[0] == "cross":
        return cases
    places = _places(cases)
    if folders[0] in PROGRAMS:
        count = 1 if folders[0] in TEXTS else 2
        # By name, as not every backend has each case.
        return [
            case
            for case, place in zip(cases, places, strict=True)
            if RUNNING[_number(_process_of(case)) % len(RUNNING)] == backend
            and _sum(place) % count == 0
        ]
    if folders[0] == "backends":
        is_grid = (
            sum(len(set(each)) > 1 for each in zip(*places, strict=True)) > 1
        )
        count = 3 if is_grid else 1
    elif backend == "torch" and not IS_FOURTH:
        return cases
    elif IS_FOURTH or LONG in f"{path.name}::{cases[0].originalname}":
        count = 9
    else:
        count = SHORT.get(folders[0], 9)
    return _every(count, cases, backend)


def _every(count, cases, backend):
    """Each case of so many, along diagonals of the grid of parameters."""
    # Tests begin with different backends, the same ones in every run.
    name = f"{cases[0].path.name}::{cases[0].originalname}"
    begin = _number(name) - SHARING.index(backend)
    return [
        case
        for case, place in zip(cases, _places(cases), strict=True)
        if (_sum(place) + begin) % count == 0
    ]


def _process_of(case):
    """A text that is the same for cases that look at one process."""
    fixtures = getattr(case, "_fixtureinfo", None)
    shared = fixtures and any(
        found[-1].scope == "module" and not name.startswith("_")
        for name, found in fixtures.name2fixturedefs.items()
    )
    return case.path.name if shared else case.name


def _sum(place):
    return sum(map(operator.mul, place, itertools.cycle(STEPS)))


def _number(text):
    return zlib.crc32(text.encode())


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

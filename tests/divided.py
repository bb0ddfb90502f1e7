"""The tests that one run of CI leaves to the runs of other backends.

`python -m runs` sets TESTS_DIVIDED. Whoever starts pytest gets every test.
"""

import os

import keras

IS_DIVIDED = os.environ.get("TESTS_DIVIDED") == "1"
BACKEND = keras.backend.backend()
# What several replicas do does not depend on how many they are. PyTorch, which
# compiles nothing, is quick and tries all; the others try some.
ALIKE = {
    "num_replicas": (2, 3, 4),
    "mirrored": (2, 3, 4),
    "strategy": ("mirrored2", "mirrored3", "mirrored4"),
    "scoped": ("mirrored2", "mirrored3", "mirrored4"),
}
# A backend's own tests count, and these look for what rarely happens.
IN_FULL = {"backends", "nothing_lost"}


def divide(config, items):
    """Deselects what is left to others."""
    if not IS_DIVIDED:
        return
    left_out = {item for item in items if not _is_here(item)}
    if BACKEND != "torch":
        left_out |= _repeated([item for item in items if item not in left_out])
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _is_here(item):
    mark = item.get_closest_marker("once")
    return mark is None or BACKEND in mark.args


def _repeated(items):
    """Of items that differ in a number of replicas, all but one.

    It is the first one of the first such items, the second one of the next, and
    so on: each number is tried by a part of the tests, and by the same ones in
    every run.
    """
    groups = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is None or IN_FULL & set(item.path.parts):
            continue
        for name, alike in ALIKE.items():
            if callspec.params.get(name) in alike:
                others = {**callspec.params, name: None}
                key = (item.path, item.originalname, name, str(others))
                groups.setdefault(key, []).append(item)
                break
    repeated = set()
    for turn, group in enumerate(groups.values()):
        del group[turn % len(group)]
        repeated.update(group)
    return repeated

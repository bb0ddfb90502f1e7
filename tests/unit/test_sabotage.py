"""The sabotages still fit the code; `python -m sabotage` applies them."""

import ast
import collections
import pathlib

import pytest

from sabotage import patch

PATCHES = patch.load()
# Where a broken promise would be worst: each has to have a sabotage.
PLACES = (
    "backends/keras_dist_jax",
    "backends/keras_dist_tensorflow",
    "backends/keras_dist_torch",
    "keras_dist/cli",
    "keras_dist/cluster_resolver",
    "keras_dist/core",
    "keras_dist/environment",
    "keras_dist/fit",
    "keras_dist/fit/workers",
    "keras_dist/inputs",
    "keras_dist/joining",
    "keras_dist/launch",
    "keras_dist/planning",
    "keras_dist/plugin",
    "keras_dist/replica",
    "keras_dist/strategies",
    "keras_dist/tools",
    "keras_dist/verification",
)


def test_there_are_enough():
    assert len(PATCHES) >= 60
    counts = collections.Counter(each.name for each in PATCHES)
    assert max(counts.values()) == 1, counts.most_common(3)


def test_each_place_has_one_and_each_backend_some():
    parents = [p for each in PATCHES for p in pathlib.Path(each.file).parents]
    assert {*PLACES} <= {*map(str, parents)}
    for backend in patch.BACKENDS:
        assert sum(backend in each.backends for each in PATCHES) >= 3


@pytest.mark.parametrize("each", PATCHES, ids=lambda each: each.name)
def test_a_patch_fits(each):
    assert each.is_whole(), "Change `old`, or delete it with its promise."
    assert each.new != each.old
    ast.parse(each.sabotaged())
    assert each.promise.endswith(".")
    assert each.backends and set(each.backends) <= set(patch.BACKENDS)
    assert each.tests
    for test in each.tests:
        name, _, function = test.partition("::")
        path = patch.TOP / name
        assert path.exists(), name
        if function:
            assert f"def {function.partition('[')[0]}(" in path.read_text()

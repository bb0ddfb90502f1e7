"""The examples in docstrings do what they show."""

import doctest
import importlib
import pkgutil

import keras
import numpy as np
import pytest

import keras_dist
from keras_dist.core.plan import Plan
from keras_dist.core.rows import bounds

# What an example may use without importing it.
NAMES = {
    "keras": keras,
    "keras_dist": keras_dist,
    "np": np,
    "Plan": Plan,
    "bounds": bounds,
}
# They need extras, or start processes; what they show has tests of its own.
PROGRAMS = ("keras_dist.bench", "keras_dist.cli", "keras_dist.launch")


def _examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    for module in pkgutil.walk_packages(keras_dist.__path__, "keras_dist."):
        if module.name.startswith(PROGRAMS):
            continue
        found = importlib.import_module(module.name)
        for test in finder.find(found, extraglobs=NAMES):
            if test.examples:
                yield pytest.param(test, id=test.name)


EXAMPLES = list(_examples())


@pytest.mark.parametrize("example", EXAMPLES)
def test_example(example):
    if any("import tensorflow" in part.source for part in example.examples):
        pytest.importorskip("tensorflow")  # of tf.data, on any backend
    report = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    result = runner.run(example, out=report.append)
    assert not result.failed, "".join(report)

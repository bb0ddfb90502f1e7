"""Keras' own tests pass in the scope of each strategy: a sample of them.

All of them take an hour; CONTRIBUTING.md has the command.
"""

import pytest

from clients.comparison import compare
from clients.known import Known
from clients.known import read_known
from clients.processes import keras_folder
from clients.report import failures
from clients.strategies import STRATEGIES
from parity.harness import BACKEND

SAMPLE = [
    "callbacks/early_stopping_test.py::EarlyStoppingTest::test_early_stopping_reuse",
    "metrics/reduction_metrics_test.py",
    "optimizers/adam_test.py",
    "optimizers/sgd_test.py",
]

has_tests = pytest.mark.skipif(
    not (keras_folder() / "optimizers/adam_test.py").is_file(),
    reason="This version of Keras is installed without its own tests.",
)

OF_OUR_OWN = """
import os

import keras
import pytest


def test_that_passes():
    assert keras.ops.sum(keras.Variable([1.0, 2.0])) == 3.0


def test_that_ends_the_process():
    import sys
    if "keras_dist" in sys.modules:
        os._exit(3)


def test_that_tells_a_scope():
    import sys
    assert "keras_dist" not in sys.modules, "there is a scope"


def test_that_fails_everywhere():
    raise ValueError("no")


@pytest.mark.skip
def test_that_is_left_out():
    pass
"""


@has_tests
@pytest.mark.runs_on("torch")
@pytest.mark.parametrize("strategy", STRATEGIES[BACKEND])
def test_what_passes_in_plain_keras_passes_in_the_scope(strategy):
    done = compare(SAMPLE, BACKEND, strategy)
    assert done.is_good, failures(done)


@pytest.mark.nightly
def test_a_difference_is_found(tmp_path):
    (tmp_path / "one_test.py").write_text(OF_OUR_OWN)
    done = compare(["one_test.py"], BACKEND, "mirrored", folder=tmp_path)
    names = {
        name: [test.split("::")[-1] for test in getattr(done, name)]
        for name in ("passed", "skipped", "fails_plain", "known", "unknown")
    }
    assert names == {
        "passed": ["test_that_passes"],
        "skipped": ["test_that_is_left_out"],
        "fails_plain": ["test_that_fails_everywhere"],
        "known": [],
        "unknown": ["test_that_ends_the_process", "test_that_tells_a_scope"],
    }
    died, told = done.unknown.values()
    assert "process ended" in died
    assert "there is a scope" in told
    assert not done.is_good


@has_tests
def test_each_known_failure_has_a_reason_and_is_a_test_of_keras():
    for entry in read_known():
        assert entry.reason.endswith("."), entry
        for test in entry.tests:
            file, _, name = test.partition("::")
            assert (keras_folder() / file).is_file(), test
            assert name, test


def test_what_is_known_can_only_shrink():
    exact = Known("Because.", ("a.py::*",))
    assert exact.explains("a.py::one", "any error")
    assert exact.passes_again(["a.py::two", "b.py::two"], {}) == ["a.py::two"]
    some = Known("Because.", ("a.py::*",), error="x.py:*: No")
    assert some.explains("a.py::one", "x.py:12: No")
    assert not some.explains("a.py::one", "x.py:12: Yes")
    failed = {"a.py::one": "x.py:12: No"}
    assert some.passes_again(["a.py::two"], failed) == []
    assert some.passes_again(["a.py::two"], {}) == ["a.py::*"]
    assert some.passes_again(["b.py::two"], {}) == []

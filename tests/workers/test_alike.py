"""Workers are alike, or an error on all of them says what differs."""

import functools

import numpy as np
import pytest

from workers import alike_jobs as jobs
from workers import clusters

APART = "ReplicaDivergenceError: Workers are at different calls"
COMPUTE = "ReplicaDivergenceError: Workers are about to compute"


@functools.cache
def launched(job, workers=2):
    fn = getattr(jobs, job)
    return clusters.run(fn, workers=workers, devices=1, timeout=300)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(
    "name",
    [
        *("reduce on the chief", "a large reduce on the chief", "dtypes"),
        *("ranks", "columns", "shapes", "large shapes", "lines"),
        *("a large and a small one", "reductions", "other reductions"),
        *("all_reduce", "axes", "keys", "a function's shapes"),
        *("a function's operations", "more in a function"),
    ],
)
def test_exchanges_that_differ_are_told_with_their_lines(name, workers):
    for found in launched("mismatches", workers):
        assert found[name].startswith(APART)
        # Of a compiled function, the program is named.
        lines = found[name].count("alike_jobs.py:")
        assert lines + found[name].count("function `compiled`") >= 2
        assert f"worker {workers - 1} at" in found[name]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("activation", "activation: 'tanh' on worker 0, 'relu' on worker 1"),
        ("trainable", "trainable: True on worker 0, False on worker 1"),
        ("floatx", "floatx: float32 on worker 0, float64 on worker 1"),
        ("loss", "compile(loss=...): 'mse' on worker 0, 'mae' on worker 1"),
        ("loss of a function", "0.5"),
        ("beta_1", "beta_1: 0.5 on worker 0, 0.75 on worker 1"),
        ("clipnorm", "clipnorm: 0.5 on worker 0, 0.75 on worker 1"),
        ("callbacks", "EarlyStopping({'baseline'"),
        ("patience", "'patience': 2"),
        ("attribute", "'rate': 0.75"),
        ("key", "'rate': 0.75"),
        ("array", "float64[1]"),
        ("read by a layer", "SETTINGS: {'rate': 0.5} on worker 0"),
        ("regularizer", "'rate': 0.75"),
        ("a batch", "momentum: 0.5 on worker 0, 0.75 on worker 1"),
        ("loop", "`optimizer`: momentum: 0.5 on worker 0, 0.75 on worker 1"),
        (
            "other step",
            "code of `fingerprints.<locals>.other_step.<locals>.<lambda>`",
        ),
    ],
)
def test_other_computations_are_told_before_they_begin(name, told):
    for found in launched("fingerprints"):
        assert found[name].startswith(COMPUTE)
        assert told in found[name]


def test_workers_fit_the_same_model():
    for found in launched("fingerprints"):
        assert found["other model"].startswith(COMPUTE)
        assert "of this process) on worker 0" in found["other model"]


def test_what_does_not_count_is_no_error():
    first, second = (found["alike"] for found in launched("fingerprints"))
    for own, expected in zip(first, second, strict=True):
        np.testing.assert_array_equal(own, expected)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("loop", ["other values before `run`", "by 1 on worker 1"]),
        ("epoch", ["at the end of an epoch", "kernel' by 0.5 on worker 1"]),
        ("end", ["other values at the end of `fit`"]),
        ("no number", ["kernel' by inf on worker 1"]),
        # A variable outside of the model.
        ("outside", ["at the end of an epoch", "by 1 on worker 1"]),
    ],
)
def test_variables_that_part_are_found(name, told):
    for found in launched("drifts"):
        assert found["loop alike"] == 2
        for text in told:
            assert text in found[name]


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_may_differ_in_what_does_not_count(workers, tmp_path):
    found = clusters.run(
        jobs.alike, (str(tmp_path),), workers=workers, devices=1, timeout=300
    )
    shape, total, weights = found[0]
    assert shape == (8, 1)
    for _, other, others in found[1:]:
        assert other == total
        for own, expected in zip(others, weights, strict=True):
            np.testing.assert_array_equal(own, expected)


def test_fit_begins_with_the_chiefs_values():
    first, second = (found["fit"] for found in launched("drifts"))
    assert first == second


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("saves"))
    return clusters.run(
        jobs.saves, (folder,), workers=2, devices=1, timeout=300
    )


@pytest.mark.parametrize("name", jobs.WAYS)
def test_the_chief_saves_and_the_others_wait(name, saved):
    chief, other = saved
    end = name == "weights"
    assert chief[name] == [not end, end] * 2
    assert other[name] == [False, False, not end, end]

"""Code of the user's that workers run, each on its own rows."""

import functools

import pytest

from parity.harness import BACKEND
from parity.harness import assert_same
from workers import clusters
from workers import own_code_jobs

# They share a job.
pytestmark = pytest.mark.runs_on("jax", "tensorflow", "torch")


@functools.cache
def outcomes(job):
    return clusters.run(job, workers=2, devices=1, timeout=300)


@pytest.mark.parametrize("name", own_code_jobs.SAME)
def test_same_numbers_on_every_worker(name):
    expected = own_code_jobs.SAME[name]()
    for worker, found in enumerate(outcomes(own_code_jobs.all_outcomes)):
        assert not isinstance(found[name], str), (worker, found[name])
        assert_same(found[name], expected)


@pytest.mark.skipif(BACKEND == "jax", reason="A step has all rows at once.")
@pytest.mark.parametrize("name", own_code_jobs.APART)
def test_what_workers_disagree_on_is_refused_on_all(name):
    for found in outcomes(own_code_jobs.all_errors):
        assert "ReplicaDivergenceError" in found[name], found[name]
        assert "differ" in found[name]

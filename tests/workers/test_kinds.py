"""What a worker's rows don't show of a layer, another's do: all agree."""

import functools

import pytest

from parity.harness import assert_same
from workers import clusters
from workers import kinds_jobs

# They share one job.
pytestmark = pytest.mark.runs_on("jax", "tensorflow", "torch")


@functools.cache
def trained():
    return clusters.run(
        kinds_jobs.all_trained, workers=2, devices=1, timeout=300
    )


@pytest.mark.parametrize("name", kinds_jobs.LAYERS)
def test_same_numbers_on_every_worker(name):
    """One's rows show a sum; the other's are zero, and none can be made up."""
    expected = kinds_jobs.trained(name)
    for worker, outcomes in enumerate(trained()):
        assert not isinstance(outcomes[name], str), (worker, outcomes[name])
        assert_same(outcomes[name], expected)

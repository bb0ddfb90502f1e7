"""`strategy.verify` over workers: each trains alone too, all agree."""

import functools

import pytest

from keras_dist.verification.report import Report
from workers import clusters
from workers import verify_jobs

# They share one job.
pytestmark = pytest.mark.runs_on("torch")


@functools.cache
def verified():
    return clusters.run(verify_jobs.verified, workers=2, devices=1, timeout=500)


@pytest.mark.parametrize("name", ["same", "all", "last"])
def test_every_worker_gets_the_same_verdict(name):
    own, other = (Report.from_dict(found[name]) for found in verified())
    assert own == other
    assert own.same is (name == "same"), own
    if name != "same":
        assert own.first.kind == "loss"
    of_last = "Worker 1 is the first whose numbers differ."
    assert (of_last in own.notes) is (name == "last")

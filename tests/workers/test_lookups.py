"""Variables that are looked up by indices have one device's numbers."""

import functools

import pytest

from parity.harness import assert_same
from parity.harness import plain
from parity.test_lookups import OVER_WORKERS
from workers import clusters
from workers import jobs


@functools.cache
def trained(workers, devices):
    return clusters.run(
        jobs.train_lookups,
        (list(OVER_WORKERS),),
        workers=workers,
        devices=devices,
        timeout=500,
    )


# With one replica, a worker sees nothing of the others' indices.
@pytest.mark.parametrize(("workers", "devices"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("name", OVER_WORKERS)
def test_fit(name, workers, devices):
    for outcome in trained(workers, devices):
        assert not isinstance(outcome[name], str), outcome[name]
        assert_same(outcome[name], plain(OVER_WORKERS[name]))

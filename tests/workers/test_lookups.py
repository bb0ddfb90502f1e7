"""Variables that are looked up by indices have one device's numbers."""

import pytest

from parity.harness import assert_same
from parity.harness import plain
from parity.test_lookups import OVER_WORKERS
from workers import clusters
from workers import jobs

# TensorFlow alone has it.
SPARSE = pytest.mark.runs_on("tensorflow")


# With one replica, a worker sees nothing of the others' indices.
@pytest.mark.parametrize(("workers", "devices"), [(2, 1), (2, 2)])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[SPARSE] if name == "sparse" else [])
        for name in OVER_WORKERS
    ],
)
def test_fit(name, workers, devices):
    found = clusters.run(
        jobs.train_lookups,
        (name,),
        workers=workers,
        devices=devices,
        timeout=300,
    )
    for outcome in found:
        assert_same(outcome, plain(OVER_WORKERS[name]))

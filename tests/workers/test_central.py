"""Several workers, each of which keeps one copy of each variable."""

import pytest

from parity import cases
from parity.harness import BACKEND
from parity.harness import assert_same
from parity.harness import plain
from workers import central_jobs
from workers import clusters

SHAPES = [(2, 1), (2, 2)]
NAMES = [
    "weighted",
    "batch_norm_conv_adam",
    "fewer_than_replicas",
    "optimizer_global_clipnorm",
    "optimizer_accumulation",
    "optimizer_ema",
    "layer_no_numbers",
]
BY_NAME = {case.name: case for case in cases.CASES if BACKEND in case.backends}


def launched(job, shape, *args):
    workers, devices = shape
    return clusters.run(
        job, args, workers=workers, devices=devices, timeout=240
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", [name for name in NAMES if name in BY_NAME])
def test_same_numbers_on_every_worker(shape, name):
    for outcome in launched(central_jobs.train_case, shape, name):
        assert_same(outcome, plain(BY_NAME[name]), BY_NAME[name].rtol)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_methods_reach_all_workers(shape):
    workers, devices = shape
    count = workers * devices
    total = 1.0 + sum(range(1, count + 1))
    for found in launched(central_jobs.api, shape):
        assert found == {
            "assigned": total,
            "updated": total + 1.0,
            "own": float(count),
            "reduced": total * count,
            "copies": 1,
            "devices": (f"cpu:{devices - 1}",),
            "local": devices,
        }

"""A `TPUStrategy` on two hosts, whose CPU devices stand in for the TPU."""

import pytest

from parity import cases
from parity.harness import BACKEND
from parity.harness import assert_same
from parity.harness import plain
from workers import clusters
from workers import tpu_jobs

BY_NAME = {case.name: case for case in cases.CASES if BACKEND in case.backends}


def launched(job, *args):
    return clusters.run(job, args, workers=2, devices=2, timeout=300)


@pytest.mark.parametrize(
    "name", ["weighted", "batch_norm_conv_adam", "fewer_than_replicas"]
)
def test_same_numbers_on_every_host(name):
    case = BY_NAME[name]
    for outcome in launched(tpu_jobs.train_case, name):
        assert_same(outcome, plain(case), case.rtol)


def test_each_host_knows_all_cores():
    first, second = launched(tpu_jobs.describe)
    assert first["topology"] == [
        [[0, 0, 0, 0], [0, 0, 0, 1]],
        [[1, 0, 0, 0], [1, 0, 0, 1]],
    ]
    assert first["order"] == [
        f"/task:{host}/device:TPU:{core}" for host in (0, 1) for core in (0, 1)
    ]
    assert (first.pop("ids"), second.pop("ids")) == ([0, 1], [2, 3])
    assert first == second
    assert (first["hosts"], first["on each"]) == (2, 2)

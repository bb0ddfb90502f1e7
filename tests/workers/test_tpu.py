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


def test_same_numbers_on_one_core_of_each_host():
    case = BY_NAME["batch_norm_conv_adam"]
    for outcome in launched(tpu_jobs.train_case, case.name, [1]):
        assert_same(outcome, plain(case), case.rtol)


@pytest.mark.parametrize("cores", [None, [0], [1]])
def test_replicas_of_all_hosts_meet(cores):
    for sums, total, rows in launched(tpu_jobs.meet, cores):
        assert sums == [10.0] * (1 if cores else 2)
        assert total == 10.0
        assert rows == [0.0, 1.0, 2.0, 3.0, 4.0]


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

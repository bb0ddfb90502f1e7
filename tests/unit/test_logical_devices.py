"""Logical devices where a replica has several, which nothing spreads yet."""

import numpy as np
import pytest

import keras_dist
from keras_dist.core.device import Device
from keras_dist.core.plan import Plan
from keras_dist.plugin.backend import override_backend
from keras_dist.testing import MemoryBackend

CPUS = [Device("cpu", index) for index in range(4)]


@pytest.fixture
def strategy():
    plan = Plan((tuple(CPUS[:2]), tuple(CPUS[2:])), tuple(CPUS[::2]))
    with override_backend(MemoryBackend(CPUS)):
        yield keras_dist.Strategy(plan)


def test_several_logical_devices_are_refused_by_name(strategy):
    x = np.ones((2, 4))
    for call in (
        lambda: strategy.experimental_assign_to_logical_device(x, 1),
        lambda: strategy.experimental_split_to_logical_devices(x, [1, 2]),
        lambda: strategy.experimental_replicate_to_logical_devices(x),
    ):
        with pytest.raises(NotImplementedError, match="2 each"):
            call()


@pytest.mark.parametrize("wrong", [2, -1, 0.0, None])
def test_an_absent_one_is_refused_first(strategy, wrong):
    with pytest.raises(ValueError, match="from 0 to 1"):
        strategy.experimental_assign_to_logical_device(1.0, wrong)


@pytest.mark.parametrize("wrong", [[1, 1], [2, 2], [1, 3], [2], 2])
def test_a_split_has_to_fit(strategy, wrong):
    with pytest.raises(ValueError, match="partition_dimensions"):
        strategy.experimental_split_to_logical_devices(np.ones((2, 4)), wrong)

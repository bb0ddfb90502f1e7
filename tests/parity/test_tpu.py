"""`fit` gives one device's numbers where CPU devices stand in for a TPU."""

import pytest

import keras_dist
from keras_dist.tpu.experimental import DeviceAssignment
from keras_dist.tpu.experimental import initialize_tpu_system
from parity import cases
from parity.harness import BACKEND
from parity.harness import assert_same
from parity.harness import plain
from parity.harness import train
from sharded.helpers import shards

NAMES = (
    "weighted",
    "batch_norm_conv_adam",
    "fewer_than_replicas",
    "optimizer_global_clipnorm",
    "layer_regularizers",
)
BY_NAME = {case.name: case for case in cases.CASES if BACKEND in case.backends}


def on_cores(num_replicas, **options):
    """A `TPUStrategy` with some of the cores, the last one first."""
    resolver = keras_dist.cluster_resolver.TPUClusterResolver("virtual")
    topology = initialize_tpu_system(resolver)
    cores = topology.device_coordinates[0, :num_replicas][::-1, None]
    return keras_dist.TPUStrategy(
        resolver, DeviceAssignment(topology, cores), **options
    )


def sharded(num_replicas):
    return on_cores(num_replicas, variables="sharded")


@pytest.mark.parametrize("num_replicas", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_same_numbers(name, num_replicas):
    case = BY_NAME[name]
    assert_same(train(case, num_replicas, on_cores), plain(case), case.rtol)


@shards
@pytest.mark.usefixtures("all_are_large")
@pytest.mark.parametrize("name", NAMES)
def test_same_numbers_in_parts(name):
    case = BY_NAME[name]
    assert_same(train(case, 3, sharded), plain(case), case.rtol)

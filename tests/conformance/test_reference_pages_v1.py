"""The reference pages of `compat.v1`: what they show beside the newer ones."""

import numpy as np
import pytest

import keras_dist
from conformance.helpers import tensor
from conformance.helpers import to_numpy
from conformance.pages import DEVICES
from conformance.pages import Range
from conformance.pages import ones_for_ever
from conformance.pages import shown

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def strategy():
    return keras_dist.compat.v1.MirroredStrategy(DEVICES)


@pytest.fixture
def one():
    return keras_dist.compat.v1.OneDeviceStrategy(device="cpu:0")


# Both pages: reduce has a default axis.
def test_reducing_over_replicas_is_the_default(strategy, one):
    def step_fn():
        context = keras_dist.get_replica_context()
        return tensor(context.replica_id_in_sync_group, "int32")

    assert to_numpy(strategy.reduce("SUM", strategy.run(step_fn))) == 1
    assert to_numpy(one.reduce("SUM", one.run(step_fn))) == 0
    assert to_numpy(one.reduce("SUM", tensor([1.0, 2.0]))).tolist() == [1, 2]


# Both pages: experimental_run, without an iterator.
def test_experimental_run_of_a_function(strategy, one):
    def fn():
        context = keras_dist.get_replica_context()
        return tensor(context.replica_id_in_sync_group, "int32")

    assert shown(strategy.experimental_run(fn)) == [0, 1]
    assert shown(one.experimental_run(fn)) == [0]


# Both pages: make_dataset_iterator, whose batches are global.
def test_an_iterator_of_a_dataset(strategy, one):
    iterator = strategy.make_dataset_iterator(Range(4, 2))
    iterator.initialize()
    results = [
        shown(strategy.experimental_run(lambda rows: rows * 2, iterator))
        for _ in range(2)
    ]
    assert results == [[[0], [2]], [[4], [6]]]
    iterator.initialize()
    assert shown(iterator.get_next()) == [[0], [1]]

    iterator = one.make_dataset_iterator(Range(4, 2))
    iterator.initialize()
    assert shown(iterator.get_next()) == [[0, 1]]


# Both pages: make_input_fn_iterator.
def test_an_iterator_of_an_input_function(strategy):
    def input_fn(input_context):
        return ones_for_ever(input_context, global_batch_size=4)

    with strategy.scope():
        iterator = strategy.make_input_fn_iterator(input_fn)
        iterator.initialize()
        replica_results = strategy.experimental_run(
            lambda rows: rows * 3, iterator
        )
    assert shown(replica_results) == [[[[3.0]]] * 2] * 2
    next_value = iterator.get_next()
    results = strategy.extended.call_for_each_replica(
        lambda rows: rows + 1, args=(next_value,)
    )
    assert shown(results) == [[[[2.0]]] * 2] * 2


# Both pages: only PER_WORKER is supported by make_input_fn_iterator.
def test_the_default_of_the_replication_mode(strategy):
    iterator = strategy.make_input_fn_iterator(
        lambda context: ones_for_ever(context, 4),
        replication_mode=keras_dist.InputReplicationMode.PER_WORKER,
    )
    iterator.initialize()
    assert shown(iterator.get_next()) == [[[[1.0]]] * 2] * 2


# Both pages: experimental_make_numpy_dataset with a session.
def test_a_dataset_of_an_array(strategy, one):
    numpy_input = np.ones([10], dtype=np.float32)
    for each in (strategy, one):
        dataset = each.experimental_make_numpy_dataset(
            numpy_input, session=None
        )
        dist_dataset = each.experimental_distribute_dataset(dataset.batch(5))
        rows = [row for x in dist_dataset for part in shown(x) for row in part]
        assert rows == [1.0] * 10


# Both pages: update_config_proto returns the configuration.
def test_a_configuration_comes_back(strategy, one):
    config = {"inter_op_parallelism_threads": 1}
    assert strategy.update_config_proto(config) == config
    assert one.update_config_proto(config) == config


# The page of OneDeviceStrategy: the class.
def test_one_device(one):
    result = 0
    for i in range(10):
        result += one.run(lambda x: x * 2, args=(i,))
    assert result == 90
    assert one.cluster_resolver is None
    assert one.num_replicas_in_sync == 1

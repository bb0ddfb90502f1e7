"""A `TPUStrategy` reaches the cores of all hosts; CPU devices stand in."""

import keras
import numpy as np
import pytest

import keras_dist
from keras_dist.tpu.experimental import DeviceAssignment
from keras_dist.tpu.experimental import initialize_tpu_system
from workers import jobs
from workers.clusters import on_workers
from workers.jobs import shown


@pytest.mark.parametrize("cores", [None, [0], [1]])
@on_workers(devices=2)
def test_replicas_of_all_hosts_meet(cores):
    strategy = jobs.tpu_strategy(cores)
    with strategy.scope():
        v = keras.Variable(1.0, aggregation="sum")

    @keras_dist.function
    def step(x):
        context = keras_dist.get_replica_context()
        v.assign(keras.ops.sum(x))
        return context.all_reduce("SUM", keras.ops.sum(x))

    (x,) = strategy.experimental_distribute_dataset([np.arange(5.0)])
    sums = strategy.experimental_local_results(strategy.run(step, (x,)))
    assert shown(list(sums)) == [10.0] * (1 if cores else 2)
    assert float(v) == 10.0
    rows = shown(strategy.gather(x, axis=0))
    assert rows == [0.0, 1.0, 2.0, 3.0, 4.0]


@on_workers(devices=2)
def test_each_host_knows_all_cores():
    topology = initialize_tpu_system(jobs.tpu())
    built = DeviceAssignment.build(topology, num_replicas=4)
    strategy = keras_dist.TPUStrategy(jobs.tpu(), built)
    index = strategy.plan.cluster.index
    ids = strategy.run(
        lambda: int(keras_dist.get_replica_context().replica_id_in_sync_group)
    )
    found = list(strategy.experimental_local_results(ids))
    assert found == [2 * index, 2 * index + 1]
    assert topology.device_coordinates.tolist() == [
        [[0, 0, 0, 0], [0, 0, 0, 1]],
        [[1, 0, 0, 0], [1, 0, 0, 1]],
    ]
    assert [built.tpu_device(replica) for replica in range(4)] == [
        f"/task:{host}/device:TPU:{core}" for host in (0, 1) for core in (0, 1)
    ]
    extended = strategy.extended
    assert (extended.num_hosts, extended.num_replicas_per_host) == (2, 2)

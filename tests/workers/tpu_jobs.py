"""What workers run in `test_tpu.py`."""

import keras
import numpy as np

import keras_dist
from keras_dist.tpu.experimental import DeviceAssignment
from keras_dist.tpu.experimental import initialize_tpu_system
from parity import cases
from parity import harness


def _resolver():
    return keras_dist.cluster_resolver.TPUClusterResolver("virtual")


def _strategy(cores):
    """A strategy on some cores of each host, or on all."""
    topology = initialize_tpu_system(_resolver())
    built = None
    if cores is not None:
        places = topology.device_coordinates[:, cores].reshape(-1, 1, 4)
        built = DeviceAssignment(topology, places)
    return keras_dist.TPUStrategy(_resolver(), built)


def meet(cores):
    """Sums and gathers over the replicas."""
    strategy = _strategy(cores)
    with strategy.scope():
        v = keras.Variable(1.0, aggregation="sum")

    @keras_dist.function
    def step(x):
        context = keras_dist.get_replica_context()
        v.assign(keras.ops.sum(x))
        return context.all_reduce("SUM", keras.ops.sum(x))

    (x,) = strategy.experimental_distribute_dataset([np.arange(5.0)])
    sums = strategy.experimental_local_results(strategy.run(step, (x,)))
    return (
        [float(each) for each in sums],
        float(v),
        keras.ops.convert_to_numpy(strategy.gather(x, axis=0)).tolist(),
    )


def train_case(name, cores=None):
    """The outcome of a case of the parity table, on some cores of each host."""
    strategy = _strategy(cores)
    harness.strategy = lambda num_replicas: strategy
    (case,) = (case for case in cases.CASES if case.name == name)
    count = strategy.num_replicas_in_sync
    return harness.train(case, count, harness.strategy)


def describe():
    """A worker's view of the TPU and of its replicas."""
    topology = initialize_tpu_system(_resolver())
    built = DeviceAssignment.build(topology, num_replicas=4)
    strategy = keras_dist.TPUStrategy(_resolver(), built)
    ids = strategy.run(
        lambda: int(keras_dist.get_replica_context().replica_id_in_sync_group)
    )
    return {
        "topology": topology.device_coordinates.tolist(),
        "order": [built.tpu_device(replica) for replica in range(4)],
        "ids": list(strategy.experimental_local_results(ids)),
        "hosts": strategy.extended.num_hosts,
        "on each": strategy.extended.num_replicas_per_host,
    }

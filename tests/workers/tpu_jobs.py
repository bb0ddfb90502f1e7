"""What workers run in `test_tpu.py`."""

import keras_dist
from keras_dist.tpu.experimental import DeviceAssignment
from keras_dist.tpu.experimental import initialize_tpu_system
from parity import cases
from parity import harness


def _resolver():
    return keras_dist.cluster_resolver.TPUClusterResolver("virtual")


def train_case(name):
    """The outcome of a case of the parity table."""
    strategy = keras_dist.TPUStrategy(_resolver())
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

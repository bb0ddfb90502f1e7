"""Plans a `TPUStrategy` for TPUs that are not here; prints what it found.

Takes names of targets, and prints a line of JSON for each.
"""

import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import keras_dist
from keras_dist.planning.targets import read_target
from keras_dist.plugin.backend import get_backend
from keras_dist.tpu.experimental import DeviceAssignment
from keras_dist.tpu.experimental import initialize_tpu_system


def resolver_of(num_hosts):
    """The resolver of the first host's worker."""
    spec = {"worker": [f"10.0.0.{index}:1" for index in range(num_hosts)]}
    return keras_dist.cluster_resolver.SimpleClusterResolver(
        keras_dist.cluster_resolver.ClusterSpec(spec),
        task_type="worker",
        task_id=0,
    )


def facts(num_hosts):
    """What a strategy and the topology say."""
    resolver = resolver_of(num_hosts)
    topology = initialize_tpu_system(resolver)
    count = topology.num_tasks * topology.num_tpus_per_task
    built = DeviceAssignment.build(topology, num_replicas=count)
    strategy = keras_dist.TPUStrategy(resolver)
    mirrored = keras_dist.MultiWorkerMirroredStrategy(resolver)
    return {
        "plan": str(strategy.plan),
        "same plan": strategy.plan == mirrored.plan,
        "mesh": topology.mesh_shape.tolist(),
        "missing": topology.missing_devices.tolist(),
        "tasks": topology.num_tasks,
        "ring": built.core_assignment[:, 0].tolist(),
        "devices": keras_dist.TPUStrategy(
            resolver, built
        ).extended.worker_devices,
    }


if __name__ == "__main__":
    for each in sys.argv[1:]:
        with get_backend().on_target(read_target(each)) as workers:
            print(json.dumps(facts(len(workers))))

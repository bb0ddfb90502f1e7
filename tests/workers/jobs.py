"""What workers run in these tests; each function is one worker's program."""

import os

# Before Keras: most of the time on JAX is XLA compiling small programs.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import dataclasses

import keras
import numpy as np

import keras_dist
from keras_dist.tpu.experimental import DeviceAssignment
from keras_dist.tpu.experimental import initialize_tpu_system
from parity import cases
from parity import harness
from parity import kinds
from parity.test_lookups import OVER_WORKERS
from parity.test_randomness import CHECKPOINTED

CASES = {case.name: case for case in [*cases.CASES, CHECKPOINTED]} | {
    f"lookups_{name}": case for name, case in OVER_WORKERS.items()
}
LEAST_ELEMENTS = 1024  # of a variable that is sharded on JAX


def tpu():
    return keras_dist.cluster_resolver.TPUClusterResolver("virtual")


def tpu_strategy(cores=None):
    """A strategy on some cores of each host, or on all."""
    topology = initialize_tpu_system(tpu())
    built = None
    if cores is not None:
        places = topology.device_coordinates[:, cores].reshape(-1, 1, 4)
        built = DeviceAssignment(topology, places)
    return keras_dist.TPUStrategy(tpu(), built)


def central():
    """One copy of each variable a worker, on its last device."""
    plan = keras_dist.MultiWorkerMirroredStrategy().plan
    return keras_dist.Strategy(
        dataclasses.replace(
            plan, variable_devices=plan.devices[-1:], is_central=True
        )
    )


def strategy_of(kind="mirrored", least_elements=1):
    """A strategy of all workers.

    Args:
        kind: String, `"mirrored"`, `"central"`, `"tpu"`, `"tpu_core"`, or what
            is sharded.
        least_elements: Integer, how many elements make a variable large.
    """
    if kind.startswith("tpu"):
        return tpu_strategy([1] if kind == "tpu_core" else None)
    if kind == "central":
        return central()
    if kind == "mirrored":
        return keras_dist.MultiWorkerMirroredStrategy()
    # Small models will do. The cluster stays for other tests.
    if keras.backend.backend() == "jax":
        from keras_dist_jax.sharding import shards as parts

        if kind == "optimizer_state":
            least_elements = LEAST_ELEMENTS
    else:
        from keras_dist_torch import shards as parts
    parts.LEAST_ELEMENTS = least_elements
    return keras_dist.MultiWorkerMirroredStrategy(**{kind: "sharded"})


def in_cluster(kind="mirrored", least_elements=1):
    """Makes the parity harness train under the workers' strategy."""
    strategy = strategy_of(kind, least_elements)
    harness.strategy = harness.sharded = lambda num_replicas: strategy
    return strategy


def train_case(kind, name):
    """The outcome of a case of the parity table."""
    count = in_cluster(kind).num_replicas_in_sync
    return harness.train(CASES[name], count, harness.strategy)


def train_kind(name):
    """The outcome of training on a kind of data."""
    count = in_cluster().num_replicas_in_sync
    return kinds.outcome_of(kinds.KINDS[name], count)


def attempted(fn, *args):
    """What a function returns; an exception as text."""
    try:
        return fn(*args)
    except Exception as error:  # a test looks at it
        return f"{type(error).__name__}: {error}"


def shown(value):
    """A value as lists and numbers, however it is nested."""
    return keras.tree.map_structure(
        lambda leaf: np.asarray(keras.ops.convert_to_numpy(leaf)).tolist(),
        value,
    )

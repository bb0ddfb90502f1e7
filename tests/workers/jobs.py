"""What workers run in these tests; each function is one worker's program."""

import os

# Before Keras: most of the time on JAX is XLA compiling small programs.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import keras
import numpy as np

import keras_dist
from parity import cases
from parity import harness
from parity import kinds
from parity import test_lookups


def in_cluster():
    """Makes the parity harness train under the workers' strategy."""
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    harness.strategy = lambda num_replicas: strategy
    return strategy


def attempted(fn, *args):
    """What a function returns; an exception as text."""
    try:
        return fn(*args)
    except Exception as error:  # it fails that case's test, not the others
        return f"{type(error).__name__}: {error}"


def train_case(name):
    """The outcome of a case of the parity table."""
    count = in_cluster().num_replicas_in_sync
    (case,) = (case for case in cases.CASES if case.name == name)
    return harness.train(case, count)


def train_lookups(name):
    """The outcome of a model that looks variables up."""
    count = in_cluster().num_replicas_in_sync
    return harness.train(test_lookups.OVER_WORKERS[name], count)


def train_kind(name):
    """The outcome of training on a kind of data."""
    count = in_cluster().num_replicas_in_sync
    return kinds.outcome_of(kinds.KINDS[name], count)


def shown(value):
    """A value as lists and numbers, however it is nested."""
    return keras.tree.map_structure(
        lambda leaf: np.asarray(keras.ops.convert_to_numpy(leaf)).tolist(),
        value,
    )

"""What the tests of distributed input share."""

import importlib.util

import keras
import numpy as np
import pytest

import keras_dist
from keras_dist.core.options import InputOptions
from keras_dist.core.options import InputReplicationMode
from keras_dist.inputs.dataset import distribute_dataset
from keras_dist.inputs.dataset import distribute_from_function

BACKEND = keras.backend.backend()
PER_REPLICA = InputOptions(
    experimental_replication_mode=InputReplicationMode.PER_REPLICA
)


def installed(module):
    return pytest.mark.skipif(
        importlib.util.find_spec(module) is None,
        reason=f"The data is of {module}, which is not installed.",
    )


def strategy_of(num_replicas):
    """A strategy of so many replicas, on CPUs."""
    return keras_dist.MirroredStrategy(
        [f"cpu:{index}" for index in range(num_replicas)]
    )


def distributed(data, num_replicas, options=None):
    return distribute_dataset(strategy_of(num_replicas), data, options)


def from_function(dataset_fn, num_replicas, options=None):
    return distribute_from_function(
        strategy_of(num_replicas), dataset_fn, options
    )


def parts(value):
    """One leaf's component of each replica, as NumPy arrays."""
    is_many = isinstance(value, keras_dist.PerReplica)
    return [
        keras.ops.convert_to_numpy(part)
        for part in (value.values if is_many else [value])
    ]


def lists(value):
    """One leaf's component of each replica, as lists."""
    return [part.tolist() for part in parts(value)]


def joined(value):
    """One leaf's rows, of all replicas in order."""
    return np.concatenate(parts(value))

"""What the tests of gradients share."""

import keras
import numpy as np

import keras_dist

BACKEND = keras.backend.backend()


def strategy_of(num_replicas):
    """A strategy of so many replicas, on CPUs; of one, `OneDeviceStrategy`."""
    if num_replicas == 1:
        return keras_dist.OneDeviceStrategy("cpu:0")
    return keras_dist.MirroredStrategy(
        [f"cpu:{index}" for index in range(num_replicas)]
    )


def array(value):
    """A tensor, variable or number as an array."""
    if isinstance(value, keras.Variable):
        value = value.value
    return np.asarray(keras.ops.convert_to_numpy(value))


def local(value):
    """Each replica's component of one leaf, as arrays."""
    is_many = isinstance(value, keras_dist.DistributedValues)
    return [array(part) for part in (value.values if is_many else [value])]


def cut(rows, num_replicas):
    """An array's rows, in shares; as `run` takes them."""
    shares = np.array_split(rows, num_replicas)
    return keras_dist.PerReplica(shares) if num_replicas > 1 else rows


def total(strategy, value):
    """The sum over replicas of a scalar, as a float."""
    return float(array(strategy.reduce("SUM", value, axis=None)))

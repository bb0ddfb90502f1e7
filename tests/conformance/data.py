"""Data to distribute."""

import keras
import numpy as np

import keras_dist
from conformance.helpers import BACKEND


def batched(columns, size, drop_remainder=False):
    """The rows of arrays in batches, as data that can be distributed."""
    columns = keras.tree.map_structure(np.asarray, columns)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        rows = tf.data.Dataset.from_tensor_slices(columns)
    else:
        rows = keras_dist.get_strategy().experimental_make_numpy_dataset(
            columns
        )
    return rows.batch(size, drop_remainder=drop_remainder)


def count(stop):
    return np.arange(stop, dtype="float32")


def distribute(strategy, *args, **kwargs):
    return strategy.experimental_distribute_dataset(batched(*args, **kwargs))


def place(value):
    """The device of a tensor, as ours are spelled."""
    if BACKEND == "jax":
        (device,) = value.devices()
        return f"{device.platform}:{device.id}"
    return value.device.rsplit("device:", 1)[-1].lower()

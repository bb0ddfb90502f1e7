"""A small classifier, and rows of 6 features and a class of 3 for each."""

import keras
import numpy as np


def rows(count):
    """So many rows, and their classes."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 6)).astype("float32")
    return x, rng.integers(0, 3, count)


def classifier(*layers, optimizer="adam", cls=keras.Sequential, **options):
    """A compiled model of such layers and one that gives the logits.

    For equal layers, set a seed before they are made.
    """
    keras.utils.set_random_seed(0)
    model = cls([keras.Input((6,)), *layers, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options = {"metrics": ["accuracy"], "loss": loss, **options}
    model.compile(optimizer, **options)
    return model

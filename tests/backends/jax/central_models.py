"""What the tests of central storage train."""

import keras
import numpy as np


def classifier(optimizer=None, cls=keras.Sequential, width=64, **kwargs):
    """A compiled classifier of 6 features, large enough to be counted."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = cls(
        [
            keras.Input((6,)),
            layers.Dense(width, activation="relu"),
            layers.BatchNormalization(),
            layers.Dense(width, activation="relu"),
            layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    kwargs = {"loss": loss, "metrics": ["accuracy"], **kwargs}
    model.compile(optimizer or keras.optimizers.Adam(0.01), **kwargs)
    return model


def variables_of(model):
    return [*model.variables, *model.optimizer.variables]


def size_of(variables):
    return sum(
        int(np.prod(v.shape)) * np.dtype(v.dtype).itemsize for v in variables
    )

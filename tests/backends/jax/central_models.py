"""What the tests of central storage train."""

import keras

from backends import classifier as small


def classifier(optimizer=None, width=64, **kwargs):
    """A compiled classifier of 6 features, large enough to be counted."""
    keras.utils.set_random_seed(0)
    return small.classifier(
        keras.layers.Dense(width, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(width, activation="relu"),
        optimizer=optimizer or keras.optimizers.Adam(0.01),
        **kwargs,
    )


def variables_of(model):
    return [*model.variables, *model.optimizer.variables]

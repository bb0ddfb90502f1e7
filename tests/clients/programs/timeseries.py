"""Forecasts from series of unequal lengths, which are padded and masked."""

import keras
from keras import layers

from clients.programs.harness import ROWS
from clients.programs.harness import rng

LENGTH, FEATURES = 5, 2


def make():
    inputs = keras.Input((LENGTH, FEATURES))
    x = layers.Masking(mask_value=-1.0)(inputs)
    x = layers.Bidirectional(layers.GRU(3, return_sequences=True))(x)
    x = layers.TimeDistributed(layers.Dense(3, activation="tanh"))(x)
    outputs = layers.Dense(1)(x)
    model = keras.Model(inputs, outputs)
    model.compile(
        optimizer=keras.optimizers.RMSprop(0.01),
        loss="mae",
        weighted_metrics=["mse"],
    )
    series = rng().normal(size=(ROWS, LENGTH + 1, FEATURES))
    x, y = series[:, :-1].astype("float32"), series[:, 1:, :1]
    for row, length in enumerate(rng().integers(1, LENGTH + 1, ROWS)):
        x[row, length:] = -1.0
    return model, {"x": x, "y": y.astype("float32")}

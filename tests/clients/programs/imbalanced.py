"""Rare cases that weigh more, with the metrics of rare cases."""

import keras
import numpy as np
from keras import layers

from clients.programs.harness import ROWS
from clients.programs.harness import rng

FIT = {"class_weight": {0: 0.3, 1: 2.5}}


def make():
    model = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(6, activation="relu"),
            layers.Dense(6, activation="relu"),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2),
        loss="binary_crossentropy",
        metrics=[
            keras.metrics.FalseNegatives(name="fn"),
            keras.metrics.TruePositives(name="tp"),
            keras.metrics.Precision(name="precision"),
            keras.metrics.Recall(name="recall"),
            keras.metrics.AUC(name="auc", num_thresholds=20),
        ],
    )
    features = rng().normal(size=(ROWS, 5)).astype("float32")
    targets = np.zeros((ROWS, 1), "uint8")
    targets[[1, 2, 12]] = 1
    return model, {"x": features, "y": targets}

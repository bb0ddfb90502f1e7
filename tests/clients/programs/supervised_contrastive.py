"""Embeddings trained by a loss that compares each row with all others."""

import keras
from keras import layers
from keras import ops

from clients.programs.harness import ROWS
from clients.programs.harness import rng


class SupervisedContrastiveLoss(keras.losses.Loss):
    def __init__(self, temperature=1, name=None):
        super().__init__(name=name)
        self.temperature = temperature

    def __call__(self, labels, feature_vectors, sample_weight=None):
        normalized = keras.utils.normalize(feature_vectors, axis=1, order=2)
        logits = ops.divide(
            ops.matmul(normalized, ops.transpose(normalized)),
            self.temperature,
        )
        labels = ops.reshape(labels, (-1,))
        positive = ops.cast(
            ops.expand_dims(labels, 1) == ops.expand_dims(labels, 0),
            "float32",
        )
        targets = positive / ops.sum(positive, axis=1, keepdims=True)
        log_p = logits - ops.logsumexp(logits, axis=1, keepdims=True)
        return -ops.mean(ops.sum(targets * log_p, axis=1))


SHOWS = ("predict", "evaluate")


def make():
    inputs = keras.Input((5,))
    encoder = layers.Dense(6, activation="relu")(inputs)
    outputs = layers.Dense(4, activation="relu")(encoder)
    model = keras.Model(inputs, outputs)
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss=SupervisedContrastiveLoss(0.5),
    )
    x = rng().normal(size=(ROWS, 5)).astype("float32")
    return model, {"x": x, "y": rng().integers(0, 3, ROWS)}

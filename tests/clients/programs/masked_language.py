"""Words are hidden and guessed: a loss for each word, some of them weigh 0."""

import keras
import numpy as np
from keras import layers
from keras import ops

from clients.programs.harness import ROWS
from clients.programs.harness import rng
from clients.programs.steps import BACKEND
from clients.programs.steps import descend

WORDS, LENGTH, SIZE = 8, 5, 4


class Positions(layers.Layer):
    """A vector for each place, the same for each sentence."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedding = layers.Embedding(LENGTH, SIZE)

    def call(self, x):
        return self.embedding(ops.arange(ops.shape(x)[1]))


class MaskedLanguageModel(keras.Model):
    def compile(self, loss_fn, **kwargs):
        super().compile(**kwargs)
        self.loss_fn = loss_fn
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def train_step(self, inputs):
        features, labels, sample_weight = inputs

        def loss_fn():
            predictions = self(features, training=True)
            loss = self.loss_fn(
                labels, predictions, sample_weight=sample_weight
            )
            if BACKEND == "tensorflow":  # whose tape sums what it is given
                return loss, loss
            return ops.mean(loss), loss

        _, loss = descend(self.optimizer, loss_fn, self.trainable_variables)
        self.loss_tracker.update_state(
            ops.stop_gradient(loss), sample_weight=sample_weight
        )
        return {"loss": self.loss_tracker.result()}


train_step_of = MaskedLanguageModel
SHOWS = ("predict",)


def make():
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, SIZE)(inputs)
    x = x + Positions()(inputs)
    x = layers.LayerNormalization()(
        x + layers.MultiHeadAttention(2, 2)(query=x, value=x, key=x)
    )
    outputs = layers.Dense(WORDS, activation="softmax")(x)
    model = MaskedLanguageModel(inputs, outputs)
    model.compile(
        optimizer=keras.optimizers.SGD(0.05),
        loss_fn=keras.losses.SparseCategoricalCrossentropy(reduction=None),
    )
    words = rng().integers(1, WORDS, (ROWS, LENGTH))
    hidden = rng().uniform(size=(ROWS, LENGTH)) < 0.4
    data = {
        "x": np.where(hidden, 0, words),
        "y": words,
        "sample_weight": hidden.astype("float32"),
    }
    return model, data

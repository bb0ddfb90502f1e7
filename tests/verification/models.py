"""Models whose numbers are the same, or differ for a known reason.

Those that differ couple rows on purpose, where nobody can repair them: the
rows of other replicas are not there.
"""

import keras
import numpy as np
from keras import ops

RNG = np.random.default_rng(3)
X = RNG.normal(size=(40, 6)).astype("float32")
Y = RNG.integers(3, size=(40,))
TARGETS = RNG.normal(size=(40, 2)).astype("float32")
TOKENS = RNG.integers(12, size=(40, 5))


def classifier(optimizer="adam"):
    """Statistics of the batch, a random layer, a metric."""
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh", name="first"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dropout(0.5, name="drop"),
            keras.layers.Dense(3, name="last"),
        ],
        name="classifier",
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def regressor(optimizer="sgd", loss="mse", layer=None, cls=keras.Model):
    """Two layers, and one of a test's own between them."""
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(4, activation="tanh", name="first")(inputs)
    if layer is not None:
        hidden = layer(hidden)
    outputs = keras.layers.Dense(2, name="last")(hidden)
    model = cls(inputs, outputs, name="regressor")
    model.compile(optimizer, loss)
    return model


def two_outputs():
    """A loss for each of two outputs, with weights, and metrics."""
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(4, activation="tanh", name="shared")(inputs)
    one = keras.layers.Dense(2, name="one")(hidden)
    two = keras.layers.Dense(2, name="two")(hidden)
    model = keras.Model(inputs, [one, two], name="two_outputs")
    model.compile(
        keras.optimizers.RMSprop(0.01, clipnorm=1.0),
        ["mse", "mae"],
        loss_weights=[1.0, 0.5],
        metrics=[["mae"], ["mse"]],
    )
    return model


@keras.saving.register_keras_serializable("verification")
class Variational(keras.Model):
    """An autoencoder with a loss and draws of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.encoder = keras.layers.Dense(4, name="encoder")
        self.decoder = keras.layers.Dense(6, name="decoder")
        self.seeds = keras.random.SeedGenerator(5)

    def call(self, x):
        mean, log_var = ops.split(self.encoder(x), 2, axis=-1)
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        return self.decoder(mean + ops.exp(0.5 * log_var) * noise)


def variational():
    model = Variational(name="variational")
    model.compile("adam", "mse")
    return model


class CentresRows(keras.layers.Layer):
    """Takes the mean over the rows that it sees from each."""

    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


class CentresTraining(keras.layers.Layer):
    """The same, in training only."""

    def call(self, x, training=False):
        return x - ops.mean(x, axis=0, keepdims=True) if training else x

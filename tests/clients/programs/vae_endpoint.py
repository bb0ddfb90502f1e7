"""A variational autoencoder whose divergence is a loss that a layer adds."""

import keras
from keras import layers
from keras import ops

from clients.programs.harness import ROWS
from clients.programs.harness import rng


class Sampling(layers.Layer):
    """Samples, and adds the divergence from the standard normal."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(3)

    def call(self, mean, log_var):
        kl = -0.5 * ops.mean(log_var - ops.square(mean) - ops.exp(log_var) + 1)
        self.add_loss(kl)
        epsilon = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_var) * epsilon


class Encoder(layers.Layer):
    def __init__(self, latents, units, **kwargs):
        super().__init__(**kwargs)
        self.hidden = layers.Dense(units, activation="relu")
        self.mean = layers.Dense(latents)
        self.log_var = layers.Dense(latents)
        self.sampling = Sampling()

    def call(self, inputs):
        x = self.hidden(inputs)
        return self.sampling(self.mean(x), self.log_var(x))


class Autoencoder(keras.Model):
    def __init__(self, features, **kwargs):
        super().__init__(**kwargs)
        self.encoder = Encoder(2, 5)
        self.hidden = layers.Dense(5, activation="relu")
        self.output_layer = layers.Dense(features, activation="sigmoid")

    def call(self, inputs):
        return self.output_layer(self.hidden(self.encoder(inputs)))


def make():
    vae = Autoencoder(6)
    vae.compile(
        keras.optimizers.Adam(0.01), loss=keras.losses.MeanSquaredError()
    )
    x = rng().uniform(size=(ROWS, 6)).astype("float32")
    return vae, {"x": x, "y": x}

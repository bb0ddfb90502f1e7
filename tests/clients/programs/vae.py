"""A variational autoencoder whose two losses are written in its step."""

import keras
from keras import layers
from keras import ops

from clients.programs.harness import ROWS
from clients.programs.harness import rng
from clients.programs.steps import Tracked


class Sampling(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_var = inputs
        shape = ops.shape(mean)
        epsilon = keras.random.normal(
            shape=(shape[0], shape[1]), seed=self.seed_generator
        )
        return mean + ops.exp(0.5 * log_var) * epsilon


class VAE(Tracked):
    NAMES = ("loss", "kl_loss")

    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def call(self, x):
        return self.decoder(self.encoder(x)[2])

    def losses(self, images):
        mean, log_var, z = self.encoder(images)
        errors = keras.losses.binary_crossentropy(images, self.decoder(z))
        kl = -0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var))
        kl_loss = ops.mean(ops.sum(kl, axis=1))
        return ops.mean(ops.sum(errors, axis=(1, 2))) + kl_loss, kl_loss


train_step_of = VAE
SHOWS = ("predict",)


def make():
    images = keras.Input((4, 4, 1))
    x = layers.Conv2D(3, 3, strides=2, padding="same", activation="relu")(
        images
    )
    x = layers.Flatten()(x)
    mean = layers.Dense(2, name="mean")(x)
    log_var = layers.Dense(2, name="log_var")(x)
    encoder = keras.Model(images, [mean, log_var, Sampling()([mean, log_var])])

    latents = keras.Input((2,))
    x = layers.Dense(2 * 2 * 3, activation="relu")(latents)
    x = layers.Reshape((2, 2, 3))(x)
    x = layers.Conv2DTranspose(
        1, 3, strides=2, padding="same", activation="sigmoid"
    )(x)
    decoder = keras.Model(latents, x)

    vae = VAE(encoder, decoder)
    vae.compile(optimizer=keras.optimizers.Adam(0.01))
    return vae, {"x": rng().uniform(size=(ROWS, 4, 4, 1)).astype("float32")}

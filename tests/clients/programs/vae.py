"""A variational autoencoder whose two losses are written in its step."""

import keras
from keras import layers
from keras import ops

from clients.programs.harness import ROWS
from clients.programs.harness import rng
from clients.programs.steps import descend


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


class VAE(keras.Model):
    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder = encoder
        self.decoder = decoder
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [self.total_loss_tracker, self.kl_loss_tracker]

    def call(self, x):
        return self.decoder(self.encoder(x)[2])

    def train_step(self, data):
        if isinstance(data, tuple):
            data = data[0]

        def loss_fn():
            mean, log_var, z = self.encoder(data)
            reconstruction = self.decoder(z)
            reconstruction_loss = ops.mean(
                ops.sum(
                    keras.losses.binary_crossentropy(data, reconstruction),
                    axis=(1, 2),
                )
            )
            kl = -0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var))
            kl_loss = ops.mean(ops.sum(kl, axis=1))
            return reconstruction_loss + kl_loss, kl_loss

        total_loss, kl_loss = descend(
            self.optimizer, loss_fn, self.trainable_weights
        )
        self.total_loss_tracker.update_state(total_loss)
        self.kl_loss_tracker.update_state(kl_loss)
        return {
            "loss": self.total_loss_tracker.result(),
            "kl_loss": self.kl_loss_tracker.result(),
        }


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

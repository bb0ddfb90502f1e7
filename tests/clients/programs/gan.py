"""A GAN: two networks, two optimizers, labels with noise."""

import keras
from keras import layers
from keras import ops

from clients.programs.harness import ROWS
from clients.programs.harness import rng
from clients.programs.steps import descend

LATENTS = 3


class GAN(keras.Model):
    def __init__(self, discriminator, generator):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.seed_generator = keras.random.SeedGenerator(1337)
        self.built = True

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")
        d_optimizer.build(self.discriminator.trainable_weights)
        g_optimizer.build(self.generator.trainable_weights)

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, real_images):
        if isinstance(real_images, tuple):
            real_images = real_images[0]
        batch_size = ops.shape(real_images)[0]
        noise = keras.random.normal(
            (batch_size, LATENTS), seed=self.seed_generator
        )
        generated = self.generator(noise)
        combined = ops.concatenate([generated, real_images], axis=0)
        labels = ops.concatenate(
            [ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0
        )

        def discriminator_loss():
            return (self.loss_fn(labels, self.discriminator(combined)),)

        (d_loss,) = descend(
            self.d_optimizer,
            discriminator_loss,
            self.discriminator.trainable_weights,
        )
        misleading = ops.zeros((batch_size, 1))

        def generator_loss():
            predictions = self.discriminator(self.generator(noise))
            return (self.loss_fn(misleading, predictions),)

        (g_loss,) = descend(
            self.g_optimizer,
            generator_loss,
            self.generator.trainable_weights,
        )
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {
            "d_loss": self.d_loss_metric.result(),
            "g_loss": self.g_loss_metric.result(),
        }


train_step_of = GAN
SHOWS = ()


def make():
    discriminator = keras.Sequential(
        [
            keras.Input((4, 4, 1)),
            layers.Conv2D(3, 3, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.GlobalMaxPooling2D(),
            layers.Dense(1),
        ]
    )
    generator = keras.Sequential(
        [
            keras.Input((LATENTS,)),
            layers.Dense(2 * 2 * LATENTS),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Reshape((2, 2, LATENTS)),
            layers.Conv2DTranspose(2, 4, strides=2, padding="same"),
            layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
        ]
    )
    gan = GAN(discriminator, generator)
    gan.compile(
        d_optimizer=keras.optimizers.Adam(learning_rate=0.003),
        g_optimizer=keras.optimizers.Adam(learning_rate=0.003),
        loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return gan, {"x": rng().uniform(size=(ROWS, 4, 4, 1)).astype("float32")}

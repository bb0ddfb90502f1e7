"""An implicit diffusion model, with a slow copy of its network."""

import math

import keras
from keras import layers
from keras import ops

from clients.programs.harness import ROWS
from clients.programs.harness import rng
from clients.programs.steps import BACKEND
from clients.programs.steps import descend

EMA = 0.9


class Embedding(layers.Layer):
    """The sine and cosine of a variance."""

    def call(self, x):
        angles = 2.0 * math.pi * x
        return ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=3)


def network():
    images = keras.Input((4, 4, 1))
    variances = keras.Input((1, 1, 1))
    e = layers.UpSampling2D(4, interpolation="nearest")(Embedding()(variances))
    x = layers.Concatenate()([layers.Conv2D(2, 1)(images), e])
    x = layers.BatchNormalization(center=False, scale=False)(x)
    x = layers.Conv2D(4, 3, padding="same", activation="swish")(x)
    x = layers.Conv2D(1, 1, kernel_initializer="zeros")(x)
    return keras.Model([images, variances], x)


class DiffusionModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.network = network()
        self.ema_network = keras.models.clone_model(self.network)
        self.seed_generator = keras.random.SeedGenerator(1)
        self.built = True

    def compile(self, loss, **kwargs):
        super().compile(**kwargs)
        self.pixel_loss = loss
        self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")
        self.image_loss_tracker = keras.metrics.Mean(name="i_loss")

    @property
    def metrics(self):
        return [self.noise_loss_tracker, self.image_loss_tracker]

    def denoise(self, noisy, noise_rates, signal_rates, training):
        net = self.network if training else self.ema_network
        noises = net([noisy, noise_rates**2], training=training)
        return noises, (noisy - noise_rates * noises) / signal_rates

    def noisy(self, images):
        rows = ops.shape(images)[0]
        noises = keras.random.normal((rows, 4, 4, 1), seed=self.seed_generator)
        times = keras.random.uniform((rows, 1, 1, 1), seed=self.seed_generator)
        angles = ops.arccos(0.95) + times * ops.arccos(0.02)
        noise_rates, signal_rates = ops.sin(angles), ops.cos(angles)
        mixed = signal_rates * images + noise_rates * noises
        return noises, noise_rates, signal_rates, mixed

    def train_step(self, images):
        if isinstance(images, tuple):
            images = images[0]
        images = self.normalizer(images)
        noises, noise_rates, signal_rates, noisy = self.noisy(images)

        def loss_fn():
            predicted, image = self.denoise(
                noisy, noise_rates, signal_rates, training=True
            )
            # A function of Keras' losses: a number for each pixel of a row.
            noise_loss = self.pixel_loss(noises, predicted)
            image_loss = self.pixel_loss(images, image)
            if BACKEND != "tensorflow":  # whose tape sums what it is given
                noise_loss = ops.mean(noise_loss)
            return noise_loss, image_loss

        noise_loss, image_loss = descend(
            self.optimizer, loss_fn, self.network.trainable_weights
        )
        self.noise_loss_tracker.update_state(noise_loss)
        self.image_loss_tracker.update_state(image_loss)
        for weight, slow in zip(
            self.network.weights, self.ema_network.weights, strict=True
        ):
            slow.assign(EMA * slow + (1 - EMA) * weight)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, images):
        if isinstance(images, tuple):
            images = images[0]
        images = self.normalizer(images)
        noises, *rates, noisy = self.noisy(images)
        predicted, image = self.denoise(noisy, *rates, training=False)
        self.noise_loss_tracker.update_state(self.pixel_loss(noises, predicted))
        self.image_loss_tracker.update_state(self.pixel_loss(images, image))
        return {m.name: m.result() for m in self.metrics}


train_step_of = DiffusionModel
SHOWS = ("evaluate",)


def make():
    images = rng().uniform(size=(ROWS, 4, 4, 1)).astype("float32")
    model = DiffusionModel()
    model.normalizer.adapt(images)
    model.compile(
        optimizer=keras.optimizers.AdamW(learning_rate=1e-2, weight_decay=1e-3),
        loss=keras.losses.mean_absolute_error,
    )
    return model, {"x": images}

"""A Wasserstein GAN: the critic's slope is held near one."""

import keras
from keras import layers
from keras import ops

from clients.programs.harness import ROWS
from clients.programs.harness import rng
from clients.programs.steps import BACKEND
from clients.programs.steps import descend

LATENTS = 3


class WGAN(keras.Model):
    def __init__(self, critic, generator, extra_steps=2, gp_weight=10.0):
        super().__init__()
        self.critic = critic
        self.generator = generator
        self.extra_steps = extra_steps
        self.gp_weight = gp_weight
        self.seed_generator = keras.random.SeedGenerator(3)
        self.d_tracker = keras.metrics.Mean(name="d_loss")
        self.g_tracker = keras.metrics.Mean(name="g_loss")
        self.built = True

    def compile(self, d_optimizer, g_optimizer, d_loss_fn, g_loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.d_loss_fn = d_loss_fn
        self.g_loss_fn = g_loss_fn
        d_optimizer.build(self.critic.trainable_weights)
        g_optimizer.build(self.generator.trainable_weights)

    @property
    def metrics(self):
        return [self.d_tracker, self.g_tracker]

    def slopes(self, images):
        """The critic's derivatives by its images."""
        if BACKEND == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                tape.watch(images)
                predictions = self.critic(images, training=True)
            return tape.gradient(predictions, images)
        if BACKEND == "torch":
            import torch

            images = images.detach().requires_grad_(True)
            predictions = self.critic(images, training=True)
            return torch.autograd.grad(
                predictions.sum(), images, create_graph=True
            )[0]
        import keras_dist

        return keras_dist.gradient(
            lambda images: ops.sum(self.critic(images, training=True)), images
        )

    def gradient_penalty(self, real, fake):
        alpha = keras.random.uniform(
            (ops.shape(real)[0], 1), seed=self.seed_generator
        )
        slopes = self.slopes(real + alpha * (fake - real))
        norm = ops.sqrt(ops.sum(ops.square(slopes), axis=1) + 1e-6)
        return ops.mean((norm - 1.0) ** 2)

    def noise(self, real):
        return keras.random.normal(
            (ops.shape(real)[0], LATENTS), seed=self.seed_generator
        )

    def train_step(self, real):
        if isinstance(real, (tuple, list)):
            real = real[0]
        for _ in range(self.extra_steps):
            noise = self.noise(real)

            def critic_loss(noise=noise):
                fake = self.generator(noise, training=True)
                cost = self.d_loss_fn(
                    self.critic(real, training=True),
                    self.critic(fake, training=True),
                )
                penalty = self.gradient_penalty(real, fake)
                return (cost + penalty * self.gp_weight,)

            (d_loss,) = descend(
                self.d_optimizer,
                critic_loss,
                self.critic.trainable_weights,
            )
        noise = self.noise(real)

        def generator_loss():
            fake = self.generator(noise, training=True)
            return (self.g_loss_fn(self.critic(fake, training=True)),)

        (g_loss,) = descend(
            self.g_optimizer,
            generator_loss,
            self.generator.trainable_weights,
        )
        self.d_tracker.update_state(d_loss)
        self.g_tracker.update_state(g_loss)
        return {m.name: m.result() for m in self.metrics}


train_step_of = WGAN
SHOWS = ()


def make():
    critic = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(5),
            layers.LeakyReLU(0.2),
            layers.Dense(1),
        ]
    )
    generator = keras.Sequential(
        [
            keras.Input((LATENTS,)),
            layers.Dense(5, use_bias=False),
            layers.LayerNormalization(),
            layers.LeakyReLU(0.2),
            layers.Dense(4, activation="tanh"),
        ]
    )
    wgan = WGAN(critic, generator)
    wgan.compile(
        d_optimizer=keras.optimizers.Adam(0.002, beta_1=0.5, beta_2=0.9),
        g_optimizer=keras.optimizers.Adam(0.002, beta_1=0.5, beta_2=0.9),
        d_loss_fn=lambda real, fake: ops.mean(fake) - ops.mean(real),
        g_loss_fn=lambda fake: -ops.mean(fake),
    )
    return wgan, {"x": rng().normal(size=(ROWS, 4)).astype("float32")}

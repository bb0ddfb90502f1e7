"""Gradients with respect to inputs, in a loss that trains: as WGAN-GP does."""

import keras
import numpy as np
import pytest
from keras import layers
from keras import ops

import keras_dist
from parity.harness import BACKEND
from parity.harness import assert_same
from parity.harness import fitted
from parity.harness import scope
from parity.harness import set_initial_weights

LATENT, SIZE = 3, 4


def slopes_of_inputs(critic, rows):
    """The critic's gradient with respect to rows, to be differentiated."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(rows)
            scores = critic(rows, training=True)
        return tape.gradient(scores, rows)
    if BACKEND == "torch":
        import torch

        rows = rows.detach().requires_grad_()
        scores = critic(rows, training=True)
        return torch.autograd.grad(
            scores, rows, torch.ones_like(scores), create_graph=True
        )[0]

    def total(rows):
        return ops.sum(critic(rows, training=True))

    return keras_dist.gradient(total, rows)


def slopes_of_weights(loss_fn, weights):
    """The loss and its gradients, in the words of the framework."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = loss_fn()
        return loss, tape.gradient(loss, weights)
    if BACKEND == "torch":
        import torch

        loss = loss_fn()
        leaves = [weight.value for weight in weights]
        return loss, list(torch.autograd.grad(loss, leaves))
    return keras_dist.value_and_grad(loss_fn, weights)


class Penalized(keras.Model):
    """A critic and a generator, whose draws are part of the data."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [
                layers.Input((LATENT,)),
                layers.Dense(6, activation="tanh"),
                layers.Dense(SIZE),
            ]
        )
        self.critic = keras.Sequential(
            [
                layers.Input((SIZE,)),
                layers.Dense(5, activation="softplus"),
                layers.Dense(1),
            ]
        )

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.d_optimizer = keras.optimizers.Adam(0.02)
        self.g_optimizer = keras.optimizers.Adam(0.01)
        self.d_optimizer.build(self.critic.trainable_variables)
        self.g_optimizer.build(self.generator.trainable_variables)

    def call(self, data):
        return self.critic(data[0])

    def train_step(self, data):
        real, latent, mix = data[0]

        def critic_loss():
            fake = self.generator(latent, training=True)
            mean = ops.mean(self.critic(fake, training=True))
            mean = mean - ops.mean(self.critic(real, training=True))
            between = mix * real + (1.0 - mix) * ops.stop_gradient(fake)
            slopes = slopes_of_inputs(self.critic, between)
            norms = ops.sqrt(ops.sum(ops.square(slopes), axis=1) + 1e-7)
            return mean + 10.0 * ops.mean(ops.square(norms - 1.0))

        def generator_loss():
            fake = self.generator(latent, training=True)
            return -ops.mean(self.critic(fake, training=True))

        weights = self.critic.trainable_weights
        d_loss, slopes = slopes_of_weights(critic_loss, weights)
        self.d_optimizer.apply(slopes, weights)
        weights = self.generator.trainable_weights
        g_loss, slopes = slopes_of_weights(generator_loss, weights)
        self.g_optimizer.apply(slopes, weights)
        return {"d_loss": d_loss, "g_loss": g_loss}


def _train(count):
    with scope(count):
        model = Penalized()
        set_initial_weights(model)
        model.compile(jit_compile=False)
    rng = np.random.default_rng(1)
    rows = 14
    data = (
        rng.normal(size=(rows, SIZE)).astype("float32"),
        rng.normal(size=(rows, LATENT)).astype("float32"),
        rng.uniform(size=(rows, 1)).astype("float32"),
    )
    return fitted(model, data, batch_size=7, epochs=3, shuffle=False, verbose=0)


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_same_numbers_and_no_warning(num_replicas):
    # Plain Keras has no `train_step(self, data)` on JAX.
    alone = 1 if BACKEND == "jax" else None
    # A warning would be an error.
    assert_same(_train(num_replicas), _train(alone), rtol=1e-4)

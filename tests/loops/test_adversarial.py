"""Loops of two models and two optimizers."""

import functools

import keras
from keras import ops

import keras_dist
from loops.helpers import adam
from loops.helpers import assert_same_numbers
from loops.helpers import batches
from loops.helpers import function
from loops.helpers import mirrored
from loops.helpers import mlp
from loops.helpers import normal
from loops.helpers import outcome
from loops.helpers import outcome_of
from loops.helpers import replicas
from loops.helpers import run
from loops.helpers import uniform
from parity.harness import assert_same
from parity.harness import to_numpy

REAL = normal(1, 4)
NOISE = normal(2, 2)
# Where between real and made each row's slope is looked at.
BETWEEN = uniform(3, 1)


def gan(strategy, compiled, steps=1):
    """Noise is data, so that all runs see the same."""
    with strategy.scope():
        generator, critic = mlp(2, 5, 4), mlp(4, 5, 1)
        of_generator, of_critic = adam(), keras.optimizers.RMSprop(0.01)
        right = keras.metrics.BinaryAccuracy(threshold=0.0)

    def bce(target, logits):
        target = ops.full_like(logits, target)
        return keras.losses.binary_crossentropy(
            target, logits, from_logits=True
        )

    @function(compiled)
    def train_step(real, noise, more_noise):
        def critic_loss():
            made = generator(noise, training=True)
            for_real, for_made = critic(real), critic(made)
            right.update_state(ops.ones_like(for_real), for_real)
            right.update_state(ops.zeros_like(for_made), for_made)
            return keras_dist.compute_average_loss(
                bce(0.9, for_real) + bce(0.0, for_made)
            )

        def generator_loss():
            made = generator(more_noise, training=True)
            return keras_dist.compute_average_loss(bce(1.0, critic(made)))

        losses = []
        for loss_fn, model, optimizer in (
            (critic_loss, critic, of_critic),
            (generator_loss, generator, of_generator),
        ):
            loss, grads = keras_dist.value_and_grad(
                loss_fn, model.trainable_variables
            )
            optimizer.apply(grads, model.trainable_variables)
            losses.append(loss)
        return losses

    data = batches(strategy, REAL, NOISE, NOISE[::-1])
    if steps == 1:
        losses = [run(strategy, train_step, batch) for batch in data]
    else:
        stacked = keras_dist.scan_steps(train_step, iter(data), steps)
        total = strategy.reduce("SUM", stacked, axis=None)
        losses = list(zip(*map(to_numpy, total), strict=True))
    return outcome(
        losses=losses,
        accuracy=[right.result()],
        generator=generator,
        critic=critic,
        of_generator=of_generator,
        of_critic=of_critic,
    )


@replicas
def test_gan(num_replicas):
    assert_same_numbers(gan, num_replicas, total=28.42293)


def test_gan_of_several_steps_in_a_call():
    several = functools.partial(gan, steps=4)
    ours = outcome_of(several, mirrored(2), True)
    assert_same(ours, outcome_of(gan, keras_dist.get_strategy(), False))


def gradient_penalty(strategy, compiled):
    """A gradient by inputs in what is differentiated by variables."""
    with strategy.scope():
        generator, critic = mlp(2, 5, 4), mlp(4, 5, 1)
        of_generator, of_critic = adam(), adam()
        norms = keras.metrics.Mean()

    def penalty(real, made, between):
        points = between * real + (1.0 - between) * made
        slopes = keras_dist.gradient(lambda x: ops.sum(critic(x)), points)
        norm = ops.sqrt(ops.sum(ops.square(slopes), axis=1) + 1e-6)
        norms.update_state(norm)
        return ops.square(norm - 1.0)

    @function(compiled)
    def critic_step(real, noise, between):
        def loss_fn():
            made = generator(noise)
            return keras_dist.compute_average_loss(
                critic(made)[:, 0]
                - critic(real)[:, 0]
                + 10.0 * penalty(real, made, between)
            )

        loss, grads = keras_dist.value_and_grad(
            loss_fn, critic.trainable_variables
        )
        of_critic.apply(grads, critic.trainable_variables)
        return loss

    @function(compiled)
    def generator_step(real, noise, between):
        def loss_fn():
            return keras_dist.compute_average_loss(
                -critic(generator(noise))[:, 0]
            )

        loss, grads = keras_dist.value_and_grad(
            loss_fn, generator.trainable_variables
        )
        of_generator.apply(grads, generator.trainable_variables)
        return loss

    losses = []
    data = batches(strategy, REAL, NOISE, BETWEEN)
    for index, batch in enumerate(data):
        losses.append(run(strategy, critic_step, batch))
        if index % 2:  # the critic takes two steps for each of the generator's
            losses.append(run(strategy, generator_step, batch))
    return outcome(
        losses=losses,
        norm=[norms.result()],
        generator=generator,
        critic=critic,
        of_generator=of_generator,
        of_critic=of_critic,
    )


@replicas
def test_gradient_penalty(num_replicas):
    assert_same_numbers(gradient_penalty, num_replicas, total=26.97888)

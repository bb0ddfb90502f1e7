"""Loops whose targets or data come from a model."""

import keras
import numpy as np
from keras import ops

import keras_dist
from loops.helpers import X
from loops.helpers import Y
from loops.helpers import adam
from loops.helpers import assert_same_numbers
from loops.helpers import batches
from loops.helpers import crossentropy
from loops.helpers import function
from loops.helpers import gathered
from loops.helpers import mlp
from loops.helpers import normal
from loops.helpers import outcome
from loops.helpers import replicas
from loops.helpers import run

NOISY = X + normal(1, 4) / 5


def teacher(strategy, compiled):
    """A second model follows the first one, and is asked for targets."""
    with strategy.scope():
        student, follower = mlp(), mlp()
        optimizer = adam()
        distance = keras.metrics.MeanSquaredError()

    @function(compiled)
    def train_step(x, noisy, y):
        targets = ops.stop_gradient(follower(noisy, training=False))

        def loss_fn():
            logits = student(x, training=True)
            distance.update_state(targets, logits)
            agreement = ops.mean(ops.square(logits - targets), axis=1)
            return keras_dist.compute_average_loss(
                crossentropy(y, logits) + 2.0 * agreement
            )

        loss, grads = keras_dist.value_and_grad(
            loss_fn, student.trainable_variables
        )
        optimizer.apply(grads, student.trainable_variables)
        for slow, fast in zip(
            follower.trainable_variables,
            student.trainable_variables,
            strict=True,
        ):
            slow.assign(0.9 * slow + 0.1 * fast)
        return loss

    losses = [
        run(strategy, train_step, batch)
        for batch in batches(strategy, X, NOISY, Y)
    ]
    return outcome(
        losses=losses,
        distance=[distance.result()],
        student=student,
        follower=follower,
        optimizer=optimizer,
    )


@replicas
def test_a_teacher_that_is_an_average_of_its_student(num_replicas):
    assert_same_numbers(teacher, num_replicas, total=33.80686)


RNG = np.random.default_rng(2)
GUMBEL = RNG.gumbel(size=(4, 6, 3)).astype("float32")
START = RNG.normal(size=(6, 4)).astype("float32")
PUSHES = RNG.normal(size=(3, 4)).astype("float32") / 2


def reinforcement(strategy, compiled):
    """What a policy does decides what it sees next, and learns from."""
    with strategy.scope():
        policy = mlp()
        optimizer = adam()
        reward_seen = keras.metrics.Mean()

    @function(compiled)
    def act(seen, gumbel):
        return ops.argmax(policy(seen, training=False) + gumbel, axis=1)

    @function(compiled)
    def learn(seen, actions, rewards):
        reward_seen.update_state(rewards)

        def loss_fn():
            chosen = -crossentropy(actions, policy(seen, training=True))
            return keras_dist.compute_average_loss(-chosen * rewards)

        loss, grads = keras_dist.value_and_grad(
            loss_fn, policy.trainable_variables
        )
        optimizer.apply(grads, policy.trainable_variables)
        return loss

    seen, losses, history = START, [], []
    for gumbel in GUMBEL:
        for batch in batches(strategy, seen, gumbel, sizes=(6,)):
            actions = gathered(strategy, strategy.run(act, batch)).astype(int)
        following = 0.8 * seen + PUSHES[actions]
        rewards = np.sum(seen**2 - following**2, axis=1)
        for batch in batches(strategy, seen, actions, rewards, sizes=(6,)):
            losses.append(run(strategy, learn, batch))
        history.append(actions)
        seen = following
    return outcome(
        losses=losses,
        actions=history,
        reward=[reward_seen.result()],
        policy=policy,
        optimizer=optimizer,
    )


@replicas
def test_a_policy_that_decides_what_it_sees_next(num_replicas):
    assert_same_numbers(reinforcement, num_replicas, total=35.97331)

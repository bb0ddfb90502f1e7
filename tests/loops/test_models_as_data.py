"""A policy that decides what it sees next trains as on one device."""

import keras
import numpy as np
from keras import ops

import keras_dist
from loops.helpers import adam
from loops.helpers import assert_same_numbers
from loops.helpers import batches
from loops.helpers import crossentropy
from loops.helpers import function
from loops.helpers import gathered
from loops.helpers import minimize
from loops.helpers import mlp
from loops.helpers import outcome
from loops.helpers import replicas
from loops.helpers import run

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

        return minimize(loss_fn, policy, optimizer)

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

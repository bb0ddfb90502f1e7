"""An actor and a critic learn from an environment, in a loop of their own."""

import keras
import numpy as np
from keras import layers
from keras import ops

from clients.programs.harness import rng
from clients.programs.steps import descend

GAMMA, STEPS, ACTIONS = 0.9, 6, 2
SHOWS = ()


class ActorCritic(keras.Model):
    """Learns in `train_on_batch` from what an episode has gathered."""

    def __init__(self):
        super().__init__()
        self.common = layers.Dense(6, activation="tanh")
        self.actor = layers.Dense(ACTIONS, activation="softmax")
        self.critic = layers.Dense(1)
        self.huber = keras.losses.Huber()
        self.reward_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.reward_tracker]

    def call(self, states):
        x = self.common(states)
        return self.actor(x), self.critic(x)

    def train_step(self, data):
        states, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        states = ops.convert_to_tensor(states)
        actions, returns = map(ops.convert_to_tensor, y)

        def loss_fn():
            probabilities, values = self(states, training=True)
            chosen = ops.take_along_axis(probabilities, actions, axis=1)
            advantage = returns - ops.stop_gradient(values)
            actor = ops.mean(-ops.log(chosen) * advantage)
            return (actor + self.huber(returns, values),)

        (loss,) = descend(self.optimizer, loss_fn, self.trainable_weights)
        self.reward_tracker.update_state(
            loss, sample_weight=ops.shape(states)[0]
        )
        return {"loss": self.reward_tracker.result()}


train_step_of = ActorCritic


def make():
    model = ActorCritic()
    model(np.zeros((1, 3), "float32"))
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.01))
    return model, {"x": rng().normal(size=(8, 3)).astype("float32")}


def train(model, data):
    """Plays, and learns after each episode; episodes end when they end."""
    logs = []
    for episode in range(4):
        random = np.random.default_rng(episode)
        state, states, actions, rewards = data["x"][episode], [], [], []
        for _ in range(STEPS - episode):
            probabilities, _ = model(state[None])
            best = ops.convert_to_numpy(probabilities)[0]
            action = int(np.argmax(best))
            states.append(state)
            actions.append(action)
            rewards.append(float(state[action]))
            state = 0.8 * np.roll(state, 1) + random.normal(0, 0.3, 3)
            state = state.astype("float32")
        discounted, total = [], 0.0
        for reward in rewards[::-1]:
            total = reward + GAMMA * total
            discounted.insert(0, [total])
        logs.append(
            model.train_on_batch(
                np.stack(states),
                (
                    np.array(actions, "int32")[:, None],
                    np.array(discounted, "float32"),
                ),
                return_dict=True,
            )
        )
    return {"episodes": logs}

"""Models with a `train_step` of their own, for each backend."""

import keras
from keras import ops

BACKEND = keras.backend.backend()


def _of_real(model, x):
    """The loss of a discriminator on real rows, and on made-up ones."""
    made = model.generator(x[:, :2])
    return ops.mean(ops.softplus(-model.critic(x))) + ops.mean(
        ops.softplus(model.critic(made))
    )


def _of_made(model, x):
    return ops.mean(ops.softplus(-model.critic(model.generator(x[:, :2]))))


class Adversarial(keras.Model):
    """Two networks, two optimizers, one step."""

    def __init__(self):
        super().__init__(name="adversarial")
        self.generator = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(6)], name="generator"
        )
        self.critic = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(5, activation="tanh"),
                keras.layers.Dense(1),
            ],
            name="critic",
        )
        self.built = True

    def compile(self, critic_optimizer, generator_optimizer):
        super().compile(optimizer=critic_optimizer)
        self.generator_optimizer = generator_optimizer

    def train_step(self, *args):
        return {
            "jax": _step_jax,
            "tensorflow": _step_tensorflow,
            "torch": _step_torch,
        }[BACKEND](self, *args)


def adversarial():
    model = Adversarial()
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1))
    return model


def _step_tensorflow(model, data):
    import tensorflow as tf

    losses = {}
    for name, loss_of, optimizer, network in _halves(model):
        with tf.GradientTape() as tape:
            loss = loss_of(model, data)
        variables = network.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        losses[name] = loss
    return losses


def _step_torch(model, data):
    losses = {}
    for name, loss_of, optimizer, network in _halves(model):
        model.zero_grad()
        loss = loss_of(model, data)
        loss.backward()
        variables = network.trainable_variables
        optimizer.apply([v.value.grad for v in variables], variables)
        losses[name] = loss.detach()
    return losses


def _step_jax(model, state, data):
    """Keras hands one optimizer's state to a step: it updates both."""
    import jax

    trainable, others, slots, metrics = state

    def loss_of(values):
        mapping = zip(model.trainable_variables, values, strict=True)
        with keras.StatelessScope(state_mapping=list(mapping)):
            return _of_real(model, data)

    loss, gradients = jax.value_and_grad(loss_of)(trainable)
    trainable, slots = model.optimizer.stateless_apply(
        slots, gradients, trainable
    )
    return {"critic_loss": loss}, (trainable, others, slots, metrics)


def _halves(model):
    yield "critic_loss", _of_real, model.optimizer, model.critic
    yield "generator_loss", _of_made, model.generator_optimizer, model.generator

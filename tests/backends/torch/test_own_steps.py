"""A user's step that goes past Keras is refused on several replicas."""

import keras
import numpy as np
import pytest
import torch
from keras import layers
from keras import ops

import keras_dist
from parity.harness import scope
from parity.harness import set_initial_weights
from parity.harness import state_of

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 3)).astype("float32")
Y = RNG.normal(size=(24, 2)).astype("float32")
FIT = {"batch_size": 8, "shuffle": False, "verbose": 0}


class Own(keras.Model):
    """Trains as Keras does, and does something else afterwards."""

    times = 0

    def train_step(self, data):
        x, y = data
        self.times += 1
        self.zero_grad()
        loss = ops.mean(ops.square(y - self(x, training=True)))
        loss.backward()
        with torch.no_grad():
            self.update()
        return {"objective": loss.detach()}


class OfPyTorch(Own):
    def update(self):
        torch.optim.SGD(self.parameters(), lr=0.1).step()


class InPlace(Own):
    def update(self):
        variables = list(self.trainable_variables)
        self.optimizer.apply([v.value.grad for v in variables], variables)
        self.layers[1].kernel.value.mul_(0.9)


class EverySecond(Own):
    def update(self):
        variables = list(self.layers[-1].trainable_variables)
        if self.times % 2 == 0:
            variables += self.layers[1].trainable_variables
        self.optimizer.apply([v.value.grad for v in variables], variables)


def _model(cls, count):
    with scope(count):
        inputs = keras.Input((3,))
        hidden = layers.Dense(4, activation="tanh", name="hidden")(inputs)
        model = cls(inputs, layers.Dense(2)(hidden))
        set_initial_weights(model).compile(keras.optimizers.SGD(0.1))
        model.optimizer.build(model.trainable_variables)
    return model


@pytest.mark.parametrize(
    ("cls", "error", "match"),
    [
        (
            OfPyTorch,
            keras_dist.UnsupportedModelError,
            r"`torch.optim.SGD` was used.*self.optimizer.apply",
        ),
        (
            InPlace,
            keras_dist.UnsupportedModelError,
            r"variable 'hidden/kernel' was changed in place.*assign",
        ),
        (
            EverySecond,
            keras_dist.ReplicaDivergenceError,
            r"gradients of different variables.*\[2, 4, 2\].*iterations",
        ),
    ],
)
def test_what_replicas_would_repeat_is_refused(cls, error, match):
    model = _model(cls, 3)
    with pytest.raises(error, match=f"(?s){match}"):
        model.fit(X, Y, **FIT)
    for name, value in state_of(model).items():
        assert np.all(np.isfinite(value)), name
    # On one device it works.
    _model(cls, None).fit(X, Y, **FIT)


def test_an_optimizer_of_pytorch_beside_fit():
    """Out of a step, and in another thread's, it is nobody's business."""
    _model(keras.Model, 2)
    weight = torch.ones(2, requires_grad=True)
    weight.sum().backward()
    torch.optim.SGD([weight], lr=0.5).step()
    assert weight.tolist() == [0.5, 0.5]

"""Layers in which the rows of a batch act on each other are named."""

import keras
import numpy as np
import pytest
from keras import layers
from keras import ops

from parity import models
from parity.harness import BACKEND
from parity.harness import JIT
from parity.harness import PLAIN_ONLY
from parity.harness import assert_same
from parity.harness import scope
from parity.harness import set_initial_weights
from parity.harness import state_of

FIT = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0}
# JAX runs one program on the global batch.
SEES_ALL_ROWS = BACKEND == "jax" or PLAIN_ONLY


class Spread(layers.Layer):
    """The spread of a minibatch as a feature, as discriminators have it."""

    def call(self, x):
        spread = ops.mean(ops.std(x, axis=0))
        return ops.concatenate([x, spread * ops.ones_like(x[:, :1])], -1)


class Neighbors(layers.Layer):
    """Each row attends to the others."""

    def call(self, x):
        return ops.matmul(ops.softmax(x @ ops.transpose(x)), x)


class InTraining(layers.Layer):
    """A normalization that knows nothing of replicas."""

    def call(self, x, training=None):
        return x - ops.mean(x, axis=0) if training else x


def functional(layer):
    x = keras.Input((4,))
    return keras.Model(x, layers.Dense(1)(layer(layers.Dense(5)(x))))


class Subclass(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(5)
        self.result = layers.Dense(1)

    def call(self, x):
        hidden = self.hidden(x)
        return self.result(hidden - ops.mean(hidden, axis=0))


class CallsAnother(keras.Model):
    """A step that never calls the model itself."""

    def __init__(self):
        super().__init__()
        self.judge = functional(Spread(name="inner"))

    def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
        return keras.losses.MeanSquaredError()(y, self.judge(x))

    def call(self, x):
        return self.judge(x)


COUPLED = {
    "spread": (lambda: functional(Spread(name="one")), "'one' of class Spread"),
    "neighbors": (lambda: functional(Neighbors(name="n")), "'n' of class"),
    "training": (lambda: functional(InTraining(name="t")), "'t' of class"),
    "lambda": (
        lambda: functional(
            layers.Lambda(lambda x: x - ops.max(x, axis=0), name="of_rows")
        ),
        "'of_rows' of class Lambda",
    ),
    "operation": (
        lambda: functional(lambda x: x - ops.mean(x, 0, keepdims=True)),
        "of class Functional",
    ),
    "subclass": (Subclass, "of class Subclass"),
    "another": (CallsAnother, "'inner' of class Spread"),
}


def _train(count, make, data=None, **options):
    with scope(count):
        model = make()
        data = data or models.table(21)
        model(data["x"][:2])
        set_initial_weights(model)
        options = {"jit_compile": JIT} | options
        model.compile(keras.optimizers.SGD(0.05), "mse", **options)
    model.fit(**data, **FIT)
    model.evaluate(**data, batch_size=7, verbose=0)
    return state_of(model)


# Each is compiled anew, which takes JAX long and shows nothing more there.
EAGER = [False] if SEES_ALL_ROWS else [False, True]


# A `compute_loss` that calls such a layer is told that of its loss, too.
@pytest.mark.filterwarnings("ignore:.*computes a loss that is not")
@pytest.mark.parametrize("eager", EAGER)
@pytest.mark.parametrize("name", COUPLED)
def test_it_is_named_once(name, eager):
    make, words = COUPLED[name]
    options = {"run_eagerly": True, "jit_compile": False} if eager else {}
    if SEES_ALL_ROWS:
        assert_same(_train(2, make, **options), _train(None, make, **options))
        return
    with pytest.warns(UserWarning, match="couples the rows") as caught:
        _train(2, make, **options)
    said = [str(w.message) for w in caught if "couples" in str(w.message)]
    assert len(said) == 1 and words in said[0], said


def test_a_prediction_alone():
    model_of = COUPLED["spread"][0]
    with scope(2):
        model = set_initial_weights(model_of())
    x = models.table(8)["x"]
    if SEES_ALL_ROWS:
        model.predict(x, verbose=0)
        return
    with pytest.warns(UserWarning, match="couples the rows"):
        model.predict(x, verbose=0)


class Views(layers.Layer):
    """Two views of each row, one after the other along the axis of rows."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(5)

    def call(self, x):
        both = self.inner(ops.concatenate([x, -x], axis=0))
        one, other = ops.split(both, 2)
        return one * other


class Stacked(keras.Model):
    """Its outputs are of both views."""

    def __init__(self):
        super().__init__()
        self.inner = functional(Views())

    def call(self, x):
        return self.inner(ops.concatenate([x, -x], axis=0))

    def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
        loss = keras.losses.MeanSquaredError()
        return loss(ops.concatenate([y, y], axis=0), y_pred)


class TimeFirst(layers.Layer):
    def call(self, x):
        x = ops.transpose(ops.stack([x, 2 * x, 3 * x], axis=1), (1, 0, 2))
        return ops.mean(x, axis=0)


class Normalized(keras.Model):
    """What Keras does with rows itself is of all of them."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(5)
        self.normalization = layers.BatchNormalization()
        self.dropped = layers.Dropout(0.0)
        self.result = layers.Dense(1)

    def call(self, x, training=None):
        self.latent = self.normalization(self.hidden(x), training=training)
        return self.result(self.dropped(self.latent))

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss + ops.mean(ops.square(self.latent))


class Collected(keras.Model):
    """Keeps what it computes in a list, a dict and a set."""

    def __init__(self):
        super().__init__()
        self.result = layers.Dense(1)
        self.seen, self.named = [], {}

    def call(self, x):
        y = self.result(x)
        self.seen.clear()
        self.seen.append(y)
        self.named["y"] = y
        return y

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss + ops.mean(ops.square(self.seen[0] + self.named["y"]))


SEPARATE = {
    "views": lambda: functional(Views()),
    "stacked": Stacked,
    "time first": lambda: functional(TimeFirst()),
    "normalized": Normalized,
    "collected": Collected,
    "residual": lambda: functional(lambda x: x + layers.Dense(5)(x)),
}


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("name", SEPARATE)
def test_what_treats_rows_alone_is_silent_and_the_same(name, num_replicas):
    make = SEPARATE[name]
    assert_same(_train(num_replicas, make), _train(None, make))


class NumPyNoise(layers.Layer):
    """Draws of its own differ from call to call."""

    def call(self, x, training=None):
        return x + np.random.default_rng().normal() if training else x


class RefusesHalves(layers.Layer):
    def call(self, x):
        if isinstance(x.shape[0], int) and x.shape[0] < 3:
            raise ValueError("Too few")
        return x - ops.mean(x, axis=0)


@pytest.mark.parametrize("layer", [NumPyNoise, RefusesHalves])
def test_what_can_not_be_told_is_silent(layer):
    with scope(2):
        model = set_initial_weights(functional(layer()))
        model.compile("sgd", "mse", jit_compile=False, run_eagerly=True)
    logs = model.fit(**models.table(16), batch_size=8, verbose=0).history
    assert np.isfinite(logs["loss"][0])


def test_calls_of_layers_are_looked_at_in_first_steps_only():
    before = keras.Layer.__call__
    _train(2, SEPARATE["residual"])
    assert keras.Layer.__call__ is before

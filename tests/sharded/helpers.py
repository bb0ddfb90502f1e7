"""What tests of a sharded optimizer state share."""

import math

import keras
import numpy as np
import pytest
from keras import optimizers

from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.powers import ShardsOptimizerState
from keras_dist.plugin.powers import shards_on_devices
from parity.harness import scope
from parity.harness import set_initial_weights
from parity.harness import sharded
from parity.harness import state_of
from parity.harness import strategy as mirrored

SHARDS = isinstance(get_backend(), ShardsOptimizerState)
shards = pytest.mark.only_on(
    "jax",
    "torch",
    reason="This backend refuses to shard it, as tests/parity tests.",
)
# In one process, for each device of it.
SHARDS_VARIABLES = shards_on_devices(get_backend())
shards_variables = pytest.mark.only_on(
    "jax", reason="Other backends don't shard them within one process."
)
ROWS = 20
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(ROWS, 3)).astype("float32")


def adam():
    """An optimizer with slots of each kind."""
    return optimizers.Adam(
        0.01, global_clipnorm=0.5, use_ema=True, gradient_accumulation_steps=2
    )


def network():
    """A model whose variables no number of parts divides."""
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.Dense(3),
        ]
    )
    return set_initial_weights(model)


def compiled(num_replicas, make=sharded, optimizer=adam):
    """A model under a strategy; with `None`, in plain Keras."""
    with scope(num_replicas, make):
        model = network()
        model.compile(optimizer(), "mse")
    return model


def fit(model, epochs=2, **options):
    """Trains on the whole data."""
    if "fit" not in vars(model):
        # Plain Keras ends with weights that are the averages' own arrays,
        # which it can't donate both on JAX.
        for variable in model.optimizer.variables:
            variable.assign(keras.ops.copy(variable.value))
    options = {"batch_size": 6, "shuffle": False, "verbose": 0, **options}
    return model.fit(X, Y, epochs=epochs, **options)


__all__ = [
    "X",
    "Y",
    "adam",
    "compiled",
    "elements_of_part",
    "fit",
    "mirrored",
    "network",
    "sharded",
    "shards",
    "state_of",
]


def elements_of_part(shape, count):
    """Elements on each device, of equal parts of one axis or of all."""
    if keras.backend.backend() != "jax":
        return math.ceil(math.prod(shape) / count)
    axis = max(shape, key=lambda size: (size % count == 0, size))
    return math.prod(shape) // axis * math.ceil(axis / count)

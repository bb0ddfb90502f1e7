"""Variables and optimizers in parts: what their tests train and save."""

import math

import keras
import numpy as np
import pytest
from keras import optimizers

import keras_dist
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.capabilities import ShardsVariables
from keras_dist.plugin.capabilities import shards_on_devices
from parity import harness
from parity.harness import set_initial_weights
from parity.harness import state_of

SHARDS = isinstance(get_backend(), ShardsVariables)
# In one process, for each device of it.
SHARDS_ON_DEVICES = shards_on_devices(get_backend())
shards = pytest.mark.only_on(
    "jax",
    reason="TensorFlow refuses to shard, as tests/parity tests, and PyTorch "
    "has workers for it: tests/workers/test_sharded.py.",
)
saves = pytest.mark.only_on(
    "jax", "torch", reason="TensorFlow has no parts to save."
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


def mirrored(num_replicas):
    """What `harness.strategy` makes, which workers replace."""
    return harness.strategy(num_replicas)


def sharded(num_replicas):
    """What `harness.sharded` makes, which workers replace."""
    return harness.sharded(num_replicas)


# In plain Keras, or on so many replicas.
PLACES = {
    "plain": (None, mirrored),
    "mirrored_2": (2, mirrored),
    "central_2": (2, harness.central),
    "sharded_2": (2, sharded),
    "sharded_3": (3, sharded),
    "variables_2": (2, harness.sharded_variables),
    "variables_3": (3, harness.sharded_variables),
}


def compiled(num_replicas, make=sharded, optimizer=adam):
    """A model under a strategy; with `None`, in plain Keras."""
    with harness.scope(num_replicas, make):
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


def trained(place="sharded_2" if SHARDS_ON_DEVICES else "mirrored_2"):
    model = compiled(*PLACES[place])
    fit(model)
    return model


def assert_equal(state, expected):
    """Compares each bit."""
    harness.assert_same(state, expected, rtol=0, atol=0)


def assert_saved(path, expected):
    """A checkpoint in parts has that state, for a model without a strategy."""
    model = compiled(None)
    keras_dist.restore_sharded(model, path)
    assert_equal(state_of(model), expected)


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


def elements_of_part(shape, count, index=0):
    """Elements that device `index` has of so many, of parts of one axis."""
    if keras.backend.backend() == "jax":
        axis = max(shape, key=lambda size: (size % count == 0, size))
        return math.prod(shape) // axis * math.ceil(axis / count)
    axis = next((size for size in shape if size % count == 0), shape[0])
    rows = math.ceil(axis / count)
    first = min(index * rows, axis)
    return math.prod(shape) // axis * (min(first + rows, axis) - first)

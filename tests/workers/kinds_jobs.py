"""What workers run in `test_kinds.py`."""

import keras
import numpy as np
from keras import layers
from keras import ops

import keras_dist
from parity.harness import BACKEND
from parity.harness import flat
from parity.harness import set_initial_weights
from parity.harness import state_of
from workers.jobs import attempted

# Keras tries layers on ones.
LEAST = 1.0


class Picky(layers.Layer):
    """Takes rows that begin with a large number, and refuses rows made up."""

    dtypes = ()

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seen = [
            self.add_weight(
                name=f"seen_{dtype}",
                shape=(),
                dtype=dtype,
                initializer="zeros",
                trainable=False,
            )
            for dtype in self.dtypes
        ]

    def compute_output_shape(self, input_shape):
        return (input_shape[0], input_shape[1] - 1)

    def call(self, x):
        # JAX has a whole batch, and calls no layer again.
        if BACKEND != "jax" and bool(ops.any(x[:, 0] < LEAST)):
            raise ValueError("Expected: a large number in front")
        self.look(x[:, 1:])
        return x[:, 1:]

    def look(self, x):
        for variable in self.seen:
            some = ops.sum(ops.cast(x[:, 0] > 0, variable.dtype))
            variable.assign_add(ops.cast(some, variable.dtype))


class Adds(Picky):
    """Adds a sum over rows, which is zero for some rows."""

    def look(self, x):
        self.add_loss(ops.sum(ops.square(x[:, 0])))


class CountsFloats(Picky):
    dtypes = ("float32",)


class CountsIntegers(Picky):
    dtypes = ("int32", "float32")


LAYERS = {cls.__name__: cls for cls in (Adds, CountsFloats, CountsIntegers)}


def data():
    """Rows; the first worker's first ones are zero in the second column."""
    rng = np.random.default_rng(0)
    x = rng.uniform(0.1, 1.0, (16, 4)).astype("float32")
    x[:, 0] += LEAST
    x[:4, 1] = 0.0
    return x, x[:, 1:].sum(axis=1, keepdims=True)


def trained(name):
    """The history and the state of a model after `fit`."""
    model = keras.Sequential(
        [keras.Input((4,)), LAYERS[name](), layers.Dense(1)]
    )
    set_initial_weights(model)
    eagerly = {"run_eagerly": True} if BACKEND == "tensorflow" else {}
    model.compile("sgd", "mse", **eagerly)
    options = {"batch_size": 8, "epochs": 3, "shuffle": False, "verbose": 0}
    history = model.fit(*data(), **options).history
    return flat("history", history) | state_of(model)


def all_trained():
    """An outcome for each layer, by name."""
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        return {name: attempted(trained, name) for name in LAYERS}

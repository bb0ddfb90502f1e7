"""Models with two optimizers, kept wherever Keras saves them from."""

import keras
import numpy as np

import keras_dist
from parity.harness import set_initial_weights
from parity.harness import to_numpy

X = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")


def adam():
    return keras.optimizers.Adam(0.05)


def _in_attributes(model, g, d):
    model.g_optimizer, model.d_optimizer = g, d


def _in_a_dict(model, g, d):
    model.optimizers = {"g": g, "d": d}


def _in_a_list(model, g, d):
    model.optimizers = [g, d]


def _in_nested_containers(model, g, d):
    model.kept = {"by net": {"g": [g], "d": ({"only": d},)}}


def _on_parts(model, g, d):
    """One is on a model inside of it, the other on a layer."""
    model.g.compile(g)
    model.d.own_optimizer = d


def _with_a_compiled_one(model, g, d):
    model.compile(g, "mse")
    model.d_optimizer = d


def _that_scale_losses(model, g, d):
    scaled = keras.optimizers.LossScaleOptimizer(g, initial_scale=2.0**4)
    model.optimizers = {"g": scaled}
    model._d_optimizer = d


# How a model keeps the optimizers, by what the tests call it.
KINDS = {
    "attributes": _in_attributes,
    "dict": _in_a_dict,
    "list": _in_a_list,
    "nested": _in_nested_containers,
    "parts": _on_parts,
    "compiled": _with_a_compiled_one,
    "scaled": _that_scale_losses,
}


class Two(keras.Model):
    """Two networks, each with an optimizer."""

    goes_backward = False  # as steps on PyTorch's FSDP have to

    def __init__(self):
        super().__init__()
        self.g = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5)])
        self.d = keras.layers.Dense(4, activation="tanh")
        self.found = lambda: ()  # what `train_step` uses

    def build(self, shape):
        self.d.build((None, 5))
        super().build(shape)

    def call(self, x):
        return self.d(self.g(x))

    def gradient(self, loss, variables):
        if not self.goes_backward:
            return keras_dist.gradient(loss, variables)
        self.zero_grad()
        loss().backward()
        return [variable.value.grad for variable in variables]

    def train_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        for optimizer, part in zip(self.found(), (self.g, self.d), strict=True):

            def loss(optimizer=optimizer):
                return optimizer.scale_loss(keras.ops.mean(self(x) ** 2))

            variables = part.trainable_variables
            optimizer.apply(self.gradient(loss, variables), variables)
        return {"loss": keras.ops.mean(self(x) ** 2)}


def made(kind="attributes", is_built=True, optimizers=None):
    """A model that keeps two optimizers in one of the `KINDS`."""
    model = Two()
    model.build((None, 4))
    set_initial_weights(model)
    model.compile(loss="mse")
    g, d = optimizers or (adam(), adam())
    KINDS[kind](model, g, d)
    if kind == "scaled":
        g = model.optimizers["g"]
    model.found = lambda: (g, d)
    if is_built:
        build(model)
    return model


def build(model):
    for optimizer, part in zip(model.found(), (model.g, model.d), strict=True):
        optimizer.build(part.trainable_variables)


def fit(model, epochs=2, **options):
    """Trains on the whole data; 6 rows are no equal shares."""
    options = {"batch_size": 6, "shuffle": False, "verbose": 0, **options}
    return model.fit(X, X, epochs=epochs, **options)


def state_of(model):
    """The weights, and all variables of the two optimizers."""
    owners = [*model.found()]
    variables = [*model.weights, *(v for o in owners for v in o.variables)]
    return {i: to_numpy(variable) for i, variable in enumerate(variables)}

"""Loops of the user's own, whose optimizers update parts of variables."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

import keras_dist
from parity.harness import assert_same
from sharded.helpers import shards

pytestmark = shards
BACKEND = keras.backend.backend()
DEVICES = [f"cpu:{index}" for index in range(4 if BACKEND == "jax" else 2)]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 40)).astype("float32")
Y = RNG.normal(size=(12, 7)).astype("float32")
optimizers = keras.optimizers
OPTIMIZERS = {
    "one norm": lambda: optimizers.Adam(0.01, global_clipnorm=0.1),
    "a norm for each": lambda: optimizers.SGD(
        0.01, momentum=0.9, clipnorm=0.05
    ),
    "accumulation": lambda: optimizers.AdamW(
        0.01, gradient_accumulation_steps=2, use_ema=True
    ),
    "a variable outside": lambda: optimizers.Nadam(0.01),
    "scaled": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(0.01, clipnorm=0.1),
        initial_scale=8.0,
        dynamic_growth_steps=2,
    ),
    "scaled too far": lambda: optimizers.LossScaleOptimizer(
        optimizers.SGD(0.01, momentum=0.9), initial_scale=2.0**127
    ),
}
WHOLE = {"lamb": lambda: optimizers.Lamb(0.01)}
KINDS = {
    "state": {"optimizer_state": "sharded"},
    "variables": {"variables": "sharded"},
    "variables, two devices a replica": {
        "variables": "sharded",
        "logical_devices": 2,
    },
}
CASES = [
    (kind, name)
    for kind in (KINDS if BACKEND == "jax" else ["state"])
    for name in (OPTIMIZERS if kind == "state" else {**OPTIMIZERS, **WHOLE})
]


def trained(strategy, name, names_few=False):
    """What four steps make of a model and of its optimizer."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((40,)),
                layers.Dense(
                    37,
                    activation="tanh",
                    kernel_constraint=keras.constraints.MaxNorm(0.5),
                ),
                layers.Dense(33),
                layers.Dense(7),
            ]
        )
        optimizer = {**OPTIMIZERS, **WHOLE}[name]()
        optimizer.build(model.trainable_variables)

    @keras_dist.function
    def step(x, y):
        variables = model.trainable_variables

        def loss_fn():
            errors = ops.square(model(x, training=True) - y)
            loss = keras_dist.compute_average_loss(ops.sum(errors, axis=-1))
            return optimizer.scale_loss(loss)

        loss, gradients = keras_dist.value_and_grad(loss_fn, variables)
        first = 2 if names_few else 0
        optimizer.apply(gradients[first:], variables[first:])
        return loss

    data = strategy.experimental_distribute_dataset([(X, Y)] * 4)
    for batch in data:
        strategy.run(step, batch)
    found = [*model.variables, *optimizer.variables]
    return {
        str(index): np.array(ops.convert_to_numpy(variable))
        for index, variable in enumerate(found)
    }


@functools.cache
def on_one_device(name, names_few=False):
    strategy = keras_dist.OneDeviceStrategy("cpu:0")
    return trained(strategy, name, names_few)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_the_numbers_of_one_device(kind, name):
    strategy = keras_dist.MirroredStrategy(DEVICES, **KINDS[kind])
    assert_same(trained(strategy, name), on_one_device(name))


def test_an_update_of_some_variables():
    strategy = keras_dist.MirroredStrategy(DEVICES, **KINDS["state"])
    found = trained(strategy, "one norm", names_few=True)
    assert_same(found, on_one_device("one norm", names_few=True))

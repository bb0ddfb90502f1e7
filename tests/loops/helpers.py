"""Training loops that are written once, and run in two ways.

A case is a function of a strategy and of whether to compile that trains
something and returns its numbers. On plain Keras, uncompiled, it says what
the numbers are; compiled, on replicas, they have to be the same.
"""

import functools

import keras
import numpy as np
import pytest

import keras_dist
from parity.harness import assert_same
from parity.harness import flat
from parity.harness import set_initial_weights
from parity.harness import to_numpy

ROWS = 28


def normal(seed, *shape):
    """Data: so many rows of normally distributed numbers."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(ROWS, *shape)).astype("float32")


def uniform(seed, *shape):
    """Data: so many rows of numbers between zero and one."""
    rng = np.random.default_rng(seed)
    return rng.uniform(size=(ROWS, *shape)).astype("float32")


X = normal(0, 4)
Y = np.random.default_rng(0).integers(0, 3, ROWS).astype("int32")

# Replicas add up in another order than one device: 1e-7 of a sum. A division
# by the root of second moments gives that to the whole of a step, whatever is
# left of the gradient where summands cancel.
RTOL = 5e-5

replicas = pytest.mark.parametrize("num_replicas", [1, 2, 4])


def mirrored(num_replicas):
    """A `MirroredStrategy` on so many virtual CPU devices."""
    return keras_dist.MirroredStrategy(
        [f"cpu:{index}" for index in range(num_replicas)]
    )


def function(compiled):
    """The decorator that compiles, or one that changes nothing."""
    return keras_dist.function if compiled else lambda fn: fn


def started(model, seed=3):
    """A model whose weights are the same wherever it was made."""
    return set_initial_weights(model, seed)


def mlp(inputs=4, units=6, outputs=3, **options):
    """A model of two dense layers; options are those of the first."""
    options = {"activation": "tanh", **options}
    return started(
        keras.Sequential(
            [
                keras.Input((inputs,)),
                keras.layers.Dense(units, **options),
                keras.layers.Dense(outputs),
            ]
        )
    )


def adam():
    """An optimizer that does not make much of gradients that are nothing."""
    return keras.optimizers.Adam(0.02, epsilon=1e-3)


def crossentropy(y, logits):
    """The loss of each row."""
    return keras.losses.sparse_categorical_crossentropy(
        y, logits, from_logits=True
    )


def batches(strategy, *arrays, sizes=(7, 7, 7, 7)):
    """A distributed dataset of batches of so many rows.

    Those of the default have shares that differ, on 2 replicas and on 4, and
    are one shape to compile.
    """
    steps = [
        tuple(each[end - size : end] for each in arrays)
        for end, size in zip(np.cumsum(sizes), sizes, strict=True)
    ]
    if strategy is keras_dist.get_strategy():
        # Datasets stay as they are then, and distributed ones are of tensors.
        to_tensor = keras.ops.convert_to_tensor
        return [tuple(map(to_tensor, step)) for step in steps]
    return strategy.experimental_distribute_dataset(steps)


def run(strategy, fn, batch):
    """Runs a step of training, and adds up the losses of the replicas."""
    losses = strategy.run(fn, args=batch)
    total = strategy.reduce("SUM", losses, axis=None)
    return keras.tree.map_structure(to_numpy, total)


def minimize(loss_fn, model, optimizer):
    """Takes a step of an optimizer, and returns the loss before it."""
    variables = model.trainable_variables
    loss, grads = keras_dist.value_and_grad(loss_fn, variables)
    optimizer.apply(grads, variables)
    return loss


def gathered(strategy, value):
    """The rows of all replicas, as an array."""
    return to_numpy(strategy.gather(value, axis=0))


def outcome(**parts):
    """A dict of arrays from lists of numbers, models and optimizers."""
    numbers = {}
    for name, part in parts.items():
        for inner in (part, getattr(part, "inner_optimizer", None)):
            if isinstance(inner, keras.Model):
                numbers |= flat(name, inner.weights)
            elif isinstance(inner, keras.optimizers.Optimizer):
                numbers |= flat(
                    f"{name}/{type(inner).__name__}", inner.variables
                )
        if isinstance(part, (list, np.ndarray)):
            numbers |= flat(name, part)
    return numbers


def outcome_of(case, strategy, compiled):
    """Runs a case with the seed that every run has."""
    keras.utils.set_random_seed(1)
    return case(strategy, compiled)


@functools.cache
def on_one_device(case):
    """A case's numbers without strategy and without compiling."""
    return outcome_of(case, keras_dist.get_strategy(), False)


def assert_same_numbers(case, num_replicas, total, rtol=RTOL):
    """Compares a compiled case on replicas with the uncompiled one.

    Args:
        case: The case.
        num_replicas: Integer, on how many replicas.
        total: Float, the magnitudes of all losses, metrics and weights, added
            up. It stands in the tests, so that backends agree among each
            other: whoever changes a case writes down what all then have.
        rtol: Largest difference, relative to an array's largest entry.
    """
    expected = on_one_device(case)
    magnitudes = sum(
        np.abs(array).sum()
        for name, array in expected.items()
        if not name.startswith(("optimizer", "of_"))
    )
    assert magnitudes == pytest.approx(total, rel=rtol)
    ours = outcome_of(case, mirrored(num_replicas), True)
    assert_same(ours, expected, rtol=rtol)

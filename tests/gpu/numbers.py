"""Trains a model and compares what is left of two trainings."""

import contextlib

import numpy as np

import keras_dist
from gpu import models
from gpu import places
from keras_dist.bench.fit import on_device

# The largest difference, relative to an array's largest entry. On a GPU some
# sums are made in another order in each run.
TOLERANCE = 2e-5 if places.IS_REHEARSAL else 2e-3
ROWS, BATCH, EPOCHS = 55, 16, 3
STRATEGIES = {
    "one device": lambda: keras_dist.OneDeviceStrategy(places.DEVICE),
    "mirrored": lambda: keras_dist.MirroredStrategy([places.DEVICE]),
    "central": lambda: keras_dist.CentralStorageStrategy(
        [places.DEVICE], places.HOST
    ),
}


def plain_keras():
    """Returns a context manager that places plain Keras on the GPU."""
    return on_device(places.DEVICE)


def trained(strategy, kind, rows=ROWS, batch=BATCH, **settings):
    """Trains for a few epochs; the last batch of each is a partial one.

    Returns:
        The model, and the history of `fit`.
    """
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = models.compiled(kind, **settings)
    x, y = models.data(kind, rows)
    history = model.fit(
        x, y, batch_size=batch, epochs=EPOCHS, shuffle=False, verbose=0
    )
    return model, history.history


def state_of(model, history=None):
    """Returns a model's and its optimizer's values by name, as arrays."""
    variables = [*model.weights, *model.optimizer.variables]
    state = {
        f"{index} {variable.path}": models.to_numpy(variable)
        for index, variable in enumerate(variables)
    }
    for name, values in (history or {}).items():
        state[name] = np.asarray(values)
    return state


def assert_same(actual, expected, tolerance=TOLERANCE):
    """Compares two states; an error names the worst entry."""
    worst, place = farthest(actual, expected)
    assert worst <= tolerance, f"{place}: off by {worst:.2e} of its largest."


def farthest(actual, expected):
    """Returns the largest relative difference, and where it is."""
    # Names of two models differ.
    assert len(actual) == len(expected)
    found = [(0.0, "nothing")]
    for (name, got), want in zip(
        actual.items(), expected.values(), strict=True
    ):
        assert got.shape == want.shape, name
        if got.size:
            scale = max(float(np.abs(want).max()), 1e-3)
            found.append((float(np.abs(got - want).max()) / scale, name))
    assert not any(np.isnan(far) for far, _ in found), "There are NaNs."
    return max(found)

"""Trains in a process of its own, and counts what the GPU holds."""

import keras
import numpy as np

from bench.memory import build_model
from gpu import memory
from gpu import places
from gpu.numbers import STRATEGIES
from keras_dist.planning import estimates
from keras_dist.tools import counting

ROWS = 4


def counted(name, num_parameters, optimizer):
    """Trains for two steps of few rows.

    Returns:
        Dict of bytes: what was planned and what was measured, between steps
        and at most.
    """
    strategy = STRATEGIES[name]()
    # What a framework allocates for itself at its start is not the model's.
    warm = build_model(10)
    warm.fit(*_data(warm), verbose=0)
    before = memory.held(warm)
    with strategy.scope():
        model = build_model(num_parameters)
        model.compile(optimizer, "mse")
    x, y = _data(model)
    memory.reset_peak()
    model.fit(x, y, batch_size=ROWS, epochs=2, verbose=0)
    _clear_gradients(model)
    placement = counting.placement_of(strategy.plan)
    planned = estimates.memory(counting.load_of(model), placement)
    own = planned[places.DEVICE]
    found = {
        "planned between steps": own.kept,
        "between steps": memory.held(model) - before,
        "planned at most": own.most,
    }
    if not places.IS_REHEARSAL:
        found["at most"] = memory.peak() - before
        found["planned at most"] += _of_update(model)
    return found


def _of_update(model):
    """Returns the bytes that an update computes with, which no plan counts."""
    if keras.backend.backend() != "torch" or not isinstance(
        model.optimizer, keras.optimizers.Adam
    ):
        return 0
    from keras_dist_torch import chunks

    weights = model.trainable_variables
    return 3 * max(
        sum(weights[index].value.nbytes for index in chunk)
        for chunk in chunks.chunks(weights)
    )


def _data(model):
    x = np.random.default_rng(0).normal(size=(ROWS, model.input_shape[-1]))
    x = x.astype("float32")
    return x, x


def _clear_gradients(model):
    """Drops the last step's gradients, which Keras on PyTorch keeps."""
    if keras.backend.backend() == "torch":
        model.zero_grad()

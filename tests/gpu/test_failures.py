"""Nothing is lost by a step without memory, or by an interrupt."""

import os
import signal
import threading

import keras
import numpy as np
import pytest

from gpu import memory
from gpu import models
from gpu import numbers
from gpu import places
from gpu.numbers import STRATEGIES

WIDTH = 2**14
ROWS = 16
# A rehearsal's stand-in for a batch that doesn't fit.
TOO_MANY = 1000


class Refusing(keras.layers.Layer):
    """Raises `MemoryError` for large batches, where memory must not end."""

    def call(self, x):
        rows = x.shape[0]
        if places.IS_REHEARSAL and isinstance(rows, int) and rows > TOO_MANY:
            raise MemoryError("Out of memory, in a rehearsal.")
        return x


def wide_model():
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            Refusing(),
            keras.layers.Dense(64 if places.IS_REHEARSAL else WIDTH, "tanh"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    return model


def rows_that_do_not_fit():
    """Returns a batch size whose activations are twice the GPU's memory."""
    if places.IS_REHEARSAL:
        return 2 * TOO_MANY
    return int(2 * memory.total() / (4 * WIDTH))


def data(rows):
    x = np.random.default_rng(2).normal(size=(rows, 4)).astype("float32")
    return x, x[:, :1]


def fit(model, rows):
    model.fit(*data(rows), batch_size=rows, shuffle=False, verbose=0)


@pytest.mark.parametrize("name", STRATEGIES)
def test_out_of_memory(name):
    """Weights are kept, and `fit` works with a smaller batch."""
    with numbers.plain_keras():
        plain = wide_model()
    fit(plain, ROWS)
    fit(plain, ROWS)
    with STRATEGIES[name]().scope():
        model = wide_model()
    fit(model, ROWS)
    before = numbers.state_of(model)
    if _sees_rows():
        with pytest.raises(Exception, match="(?i)memory|resource|alloc"):
            fit(model, rows_that_do_not_fit())
    numbers.assert_same(numbers.state_of(model), before, tolerance=0.0)
    fit(model, ROWS)
    numbers.assert_same(numbers.state_of(model), numbers.state_of(plain))


def _sees_rows():
    """Returns whether the step can fail here, which a stand-in can't always.

    TensorFlow traces a step for any number of rows.
    """
    is_traced = keras.backend.backend() == "tensorflow"
    return not (places.IS_REHEARSAL and is_traced)


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.05, 0.2])
@pytest.mark.parametrize("name", STRATEGIES)
def test_interrupt(name, seconds):
    """After Ctrl-C the variables have the values of a whole step.

    On PyTorch it may come between two operations of a step, which runs as
    Python: then values are finite, and training goes on.
    """
    with STRATEGIES[name]().scope():
        model = models.compiled("mlp")
    x, y = models.data("mlp", 64)
    settings = {"batch_size": 16, "shuffle": False, "verbose": 0}
    model.fit(x, y, **settings)
    begun, ended = threading.Event(), threading.Event()
    begins = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: begun.set()
    )

    def interrupt():
        begun.wait()
        wait = seconds
        # Again, because Keras on JAX swallows some interrupts.
        while not ended.wait(wait):
            os.kill(os.getpid(), signal.SIGINT)
            wait = 5.0

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            model.fit(x, y, epochs=100_000, callbacks=[begins], **settings)
    finally:
        ended.set()
        thread.join()
    state = numbers.state_of(model)
    model.fit(x, y, **settings)
    if keras.backend.backend() == "torch":
        assert all(np.isfinite(value).all() for value in state.values())
        return
    (steps,) = (v for k, v in state.items() if k.endswith("iteration"))
    with numbers.plain_keras():
        plain = models.compiled("mlp")
        # The last epoch may have ended early.
        epochs, left = divmod(int(steps), 4)
        for rows, times in ((64, epochs), (16 * left, 1)):
            if rows and times:
                plain.fit(x[:rows], y[:rows], epochs=times, **settings)
    numbers.assert_same(state, numbers.state_of(plain))

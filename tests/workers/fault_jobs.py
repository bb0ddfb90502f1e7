"""A worker that trains, and comes to harm where it is told to.

`python fault_jobs.py PLACE SECONDS`: prints `imported`, waits for a line, then
trains steps for ever, prints one line for each, and at PLACE (`start`, `step`,
`validation`, `saving`, or `nowhere`) prints `here` and waits to be killed or
stopped. With `native code`, it holds Python's lock for 10 seconds once, and the
others have `others native code`; silence is 3 seconds then. With `loop`, or
`end of loop` for one that stops, it trains in a loop of a compiled function,
and prints `kept` if an error leaves variables alone.
With `parts`, or `in parts` for one that stops, it saves twice to CHECKPOINT;
with `later parts`, or `in later parts`, in the background.
"""

import ctypes
import importlib
import os
import sys
import tempfile
import threading

os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import keras
import numpy as np

import keras_dist
from keras_dist.fit.workers.saving import Saving
from keras_dist.plugin.backend import get_backend


class Harm(keras.callbacks.Callback):
    """Says where training is, and stays there."""

    def __init__(self, place):
        super().__init__()
        self._place = place

    def _reach(self, place):
        if place == self._place:
            print("here", flush=True)
            threading.Event().wait()

    def on_train_batch_end(self, batch, logs=None):
        print("step", flush=True)
        if batch == 3:
            self._reach("step")
            if self._place == "native code":
                self._place = "nowhere"
                print("here", flush=True)
                ctypes.PyDLL(None).sleep(10)

    def on_test_batch_begin(self, batch, logs=None):
        self._reach("validation")


def main(place, seconds):
    # Seconds count from here on, however long the imports took.
    print("imported", flush=True)
    sys.stdin.readline()
    harm = Harm(place)
    if place.endswith("native code"):
        set_silence(3.0)
        seconds = None
    options = keras_dist.experimental.CommunicationOptions(
        timeout_seconds=seconds
    )
    if place.endswith("parts"):
        save_in_parts(options, place, harm)
        return
    strategy = keras_dist.MultiWorkerMirroredStrategy(
        communication_options=options
    )
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    if place.endswith("loop"):
        loop(strategy, model, harm if place != "loop" else None)
        return
    harm._reach("start")
    x, y = np.ones((40, 4), "float32"), np.ones((40, 1), "float32")
    folder = tempfile.mkdtemp()
    if place == "saving":
        write = model.save_weights
        object.__setattr__(
            model,
            "save_weights",
            lambda *args, **kwargs: (harm._reach("saving"), write(*args)),
        )
    saver = keras.callbacks.ModelCheckpoint(
        f"{folder}/a.weights.h5", save_weights_only=True
    )
    model.fit(
        x,
        y,
        batch_size=8,
        epochs=10**6,
        validation_data=(x, y),
        validation_batch_size=8,
        callbacks=[harm, saver],
        verbose=0,
    )


def set_silence(seconds):
    """Makes a silent worker one that is lost after fewer seconds."""
    name = keras.backend.backend()
    module = {
        "jax": "cluster.watch",
        "tensorflow": "cluster",
        "torch": "workers",
    }[name]
    importlib.import_module(f"keras_dist_{name}.{module}").SILENCE = seconds


def loop(strategy, model, harm):
    """Trains steps of a compiled function; `harm` stops after some of them."""
    optimizer, kernel = model.optimizer, model.weights[0]
    optimizer.build(model.trainable_variables)

    @keras_dist.function
    def step(x):
        def loss():
            return keras_dist.compute_average_loss(
                keras.ops.mean(model(x), axis=-1)
            )

        variables = model.trainable_variables
        value, gradients = keras_dist.value_and_grad(loss, variables)
        optimizer.apply(gradients, variables)
        return value

    (batch,) = strategy.experimental_distribute_dataset([np.ones((8, 4))])
    for number in range(10**6):
        before = keras.ops.convert_to_numpy(kernel)
        if harm is not None and number == 3:
            harm._reach("end of loop")
        try:
            value = strategy.run(step, args=(batch,))
            keras.ops.convert_to_numpy(strategy.reduce("SUM", value, axis=None))
        except Exception:
            after = keras.ops.convert_to_numpy(kernel)
            print("kept" if np.array_equal(after, before) else after)
            raise
        print("step", flush=True)


def save_in_parts(options, place, harm):
    """Saves ones and then twos; `harm` stops while twos are saved."""
    strategy = keras_dist.MultiWorkerMirroredStrategy(
        variables="sharded", communication_options=options
    )
    with strategy.scope():
        model = wide_model()
    path = os.environ["CHECKPOINT"]
    set_all(model, 1)
    keras_dist.save_sharded(model, path)
    set_all(model, 2)
    if place == "in parts":
        backend = type(get_backend())
        backend.save_shards = lambda *args: harm._reach(place)
    elif place == "in later parts":
        Saving.run = lambda *args: harm._reach(place)
    is_later = place.endswith("later parts")
    keras_dist.save_sharded(model, path, wait=not is_later).result()


def wide_model():
    """A model with a variable that is large."""
    return keras.Sequential([keras.Input((64,)), keras.layers.Dense(65)])


def set_all(model, number):
    for variable in model.variables:
        variable.assign(np.full(variable.shape, number))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))

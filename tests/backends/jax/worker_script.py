"""A worker that trains until something happens to it.

`python worker_script.py MODE SECONDS`: prints `step` at each step. MODE `train`
goes on for ever; `end` ends after the first epoch where it is the chief, and a
second later where it is not; `catch` ends with status 7 if a worker was lost.
"""

import os
import sys
import threading

os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import keras
import numpy as np

import keras_dist


class Steps(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        print("step", flush=True)


def main(mode, seconds):
    strategy = keras_dist.MultiWorkerMirroredStrategy(
        communication_options=keras_dist.experimental.CommunicationOptions(
            timeout_seconds=seconds
        )
    )
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    x, y = np.ones((16, 4), "float32"), np.ones((16, 1), "float32")
    epochs = 1 if mode == "end" else 10**6
    try:
        model.fit(x, y, 8, epochs, callbacks=[Steps()], verbose=0)
    except keras_dist.WorkerLostError:
        if mode == "catch":
            sys.exit(7)
        raise
    if not strategy.plan.is_chief:
        threading.Event().wait(1)  # the chief has ended by then


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))

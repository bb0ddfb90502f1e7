"""A training script that only a signal ends, or an error of worker 1."""

import os
import sys

import keras
import numpy as np

import keras_dist


class Shown(keras.callbacks.Callback):
    """Says that the second epoch begins; may fail on worker 1."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            print("training", flush=True)
            index = os.environ["KERAS_DIST_WORKER_INDEX"]
            if sys.argv[1:] == ["raise"] and index == "1":
                raise KeyError("its own")


def main():
    """Trains without an end."""
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((2,)), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
    x = np.ones((4, 2), "float32")
    model.fit(x, x[:, :1], epochs=10**9, verbose=0, callbacks=[Shown()])


if __name__ == "__main__":
    main()

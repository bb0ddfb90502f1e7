"""Saves a checkpoint in parts again and again, until it is killed.

`python saving_script.py PATH WAY`: prints each number once all variables have
been saved with that value. With `background`, each is saved while the next one
is assigned. With `once`, it ends right after it began to save the first; with
`fails`, so it does, and the checkpoint can't be finished.
"""

import itertools
import signal
import sys

import keras
import numpy as np

import keras_dist
from keras_dist.fit.workers.checkpoint_folder import CheckpointFolder
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.capabilities import shards_on_devices


def make_model():
    if shards_on_devices(get_backend()):
        strategy = keras_dist.MirroredStrategy(variables="sharded")
    else:
        strategy = keras_dist.MirroredStrategy()
    with strategy.scope():
        layers = [keras.layers.Dense(400) for _ in range(4)]
        return keras.Sequential([keras.Input((400,)), *layers])


def fail(*_):
    raise OSError("no space left")


def main(path, way):
    model = make_model()
    if way == "fails":
        CheckpointFolder.commit = fail
    saved = None
    for number in itertools.count(1):
        for variable in model.variables:
            variable.assign(np.full(variable.shape, number))
        if saved is not None:
            saved.result()
            print(number - 1, flush=True)
        saved = keras_dist.save_sharded(model, path, wait=way == "foreground")
        if way in ("once", "fails"):
            return


if __name__ == "__main__":
    # It is ignored in what a shell has started in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(*sys.argv[1:])

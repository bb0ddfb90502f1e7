"""Saves a checkpoint in parts again and again, until it is killed.

`python saving_script.py PATH`: prints each number once all variables have been
saved with that value.
"""

import itertools
import sys

import keras
import numpy as np

import keras_dist
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.powers import shards_on_devices


def make_model():
    if shards_on_devices(get_backend()):
        strategy = keras_dist.MirroredStrategy(variables="sharded")
    else:
        strategy = keras_dist.MirroredStrategy()
    with strategy.scope():
        layers = [keras.layers.Dense(400) for _ in range(4)]
        return keras.Sequential([keras.Input((400,)), *layers])


def main(path):
    model = make_model()
    for number in itertools.count(1):
        for variable in model.variables:
            variable.assign(np.full(variable.shape, number))
        keras_dist.save_sharded(model, path)
        print(number, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

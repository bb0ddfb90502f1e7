"""A training script that makes one of the mistakes of leaving workers alone."""

import sys

import keras
import numpy as np

import keras_dist


def model_made():
    """A small compiled model."""
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def train(mistake):
    """Trains, and prints how far it came."""
    x = np.ones((4, 2), "float32")
    if mistake == "made outside of the scope":
        strategy = keras_dist.MultiWorkerMirroredStrategy()
        model = model_made()
        with strategy.scope():
            model.fit(x, x[:, :1], verbose=0)
    else:
        strategy = keras_dist.MirroredStrategy()
        with strategy.scope():
            weight = keras.Variable(1.0)
        strategy.run(lambda: weight.assign_add(1.0))
    print("done")


if __name__ == "__main__":
    train(sys.argv[1])

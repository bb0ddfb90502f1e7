"""What workers run in the tests of profiles on several workers."""

import pathlib

import keras
import numpy as np

import keras_dist
from profiles.steps import recorded


def fit(folder):
    """Trains with and without a profile, and reads this worker's trace."""
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")

    def weights(*callbacks):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("adam", "mse")
        model.fit(x, x, batch_size=4, verbose=0, callbacks=list(callbacks))
        return [weight.tolist() for weight in model.get_weights()]

    profile = strategy.profile(folder, steps=(2, 4))
    return {
        "with": weights(profile),
        "without": weights(),
        "folder": pathlib.Path(profile.directory).name,
        "steps": recorded(pathlib.Path(profile.directory)),
    }

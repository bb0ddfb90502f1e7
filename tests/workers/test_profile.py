"""With `strategy.profile`, each worker has a trace of its own."""

import os
import pathlib

import keras
import numpy as np

import keras_dist
from profiles.steps import recorded
from workers.clusters import on_workers


@on_workers()
def test_each_worker_has_a_trace(tmp_path):
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")

    def weights(*callbacks):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("adam", "mse")
        model.fit(x, x, batch_size=4, verbose=0, callbacks=list(callbacks))
        return [weight.tolist() for weight in model.get_weights()]

    profile = strategy.profile(tmp_path, steps=(2, 4))
    found = weights(profile)
    assert weights() == found
    folder = pathlib.Path(profile.directory)
    assert folder.name == f"worker-{strategy.plan.cluster.index}"
    assert recorded(folder) == [2, 3]
    assert set(os.listdir(tmp_path)) <= {"worker-0", "worker-1"}
    return found

"""The file from which a model goes on."""

import keras
import numpy as np

from keras_dist.fit.workers.built import built_for
from keras_dist.fit.workers.state_file import restore_state
from keras_dist.fit.workers.state_file import write_state


def test_a_model_without_trainable_variables(tmp_path):
    """Its optimizer has nothing to build slots for."""

    def made(mean):
        layer = keras.layers.Normalization(mean=mean, variance=1.0)
        frozen = keras.layers.Dense(1, kernel_initializer="ones")
        frozen.trainable = False
        model = keras.Sequential([keras.Input((2,)), layer, frozen])
        model.compile("sgd", "mse")
        return model

    path = str(tmp_path / "latest.weights.h5")
    saved, other = made(1.0), made(1.0)
    saved.layers[-1].kernel.assign(np.full((2, 1), 3.0))
    write_state(saved, path, {"epoch": 4}, built_for(saved))
    assert restore_state(other, path, None) == {"epoch": 4}
    for own, expected in zip(
        other.get_weights(), saved.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(own, expected)

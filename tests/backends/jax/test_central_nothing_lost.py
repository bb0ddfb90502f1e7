"""Each failure of `test_nothing_lost`, where variables are on one device."""

import keras
import pytest
import test_nothing_lost

import keras_dist

globals().update(
    {
        name: value
        for name, value in vars(test_nothing_lost).items()
        if name.startswith("test_") or name == "trained"
    }
)


@pytest.fixture
def make_model():
    """Makes a compiled classifier with variables on a device apart."""

    def make(num_replicas, layers=(8,), cls=keras.Sequential, **kwargs):
        keras.utils.set_random_seed(0)
        devices = [f"cpu:{i}" for i in range(num_replicas or 1)]
        with keras_dist.CentralStorageStrategy(devices, "cpu:3").scope():
            stack = [keras.layers.Dense(n, activation="relu") for n in layers]
            model = cls([keras.Input((6,)), *stack, keras.layers.Dense(3)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(**{"optimizer": "adam", "loss": loss, **kwargs})
        return model

    return make

"""Python shows what a layer or a model warns of as often as on one device."""

import warnings

import keras
import pytest
from keras import layers

import keras_dist
from parity import models
from parity.harness import scope


class Warns(layers.Layer):
    def call(self, x):
        for text in ("This is odd", "This is odd"):
            warnings.warn(text, stacklevel=1)
        return x


class WarnsInItsStep(keras.Sequential):
    def compute_loss(self, *args, **kwargs):
        warnings.warn(message="This is strange", stacklevel=1)
        return super().compute_loss(*args, **kwargs)


def _shown(call):
    """Returns the texts that Python shows, and where they come from."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", "This is")
        call()
    return sorted((str(each.message), each.filename) for each in caught)


def _train(count):
    with scope(count), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = WarnsInItsStep([layers.Input((4,)), Warns(), layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
    data = models.table(12)
    return _shown(lambda: model.fit(**data, batch_size=6, verbose=0))


def test_fit():
    shown = _train(3)
    assert shown == _train(None)
    assert {name for _, name in shown} == {__file__}
    assert len(shown) == 2


def test_run():
    strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])

    def replica_fn():
        warnings.warn(message="This is odd", category=UserWarning, stacklevel=1)
        return keras.ops.ones(())

    def run():
        for _ in range(2):
            strategy.run(replica_fn)

    assert _shown(run) == [("This is odd", __file__)]
    with pytest.warns(UserWarning, match="from elsewhere"):
        warnings.warn(message="from elsewhere", stacklevel=1)

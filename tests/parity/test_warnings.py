"""What a layer or a model warns of comes as often as on one device."""

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
            warnings.warn(text, stacklevel=2)
        return x


class WarnsInItsStep(keras.Sequential):
    def compute_loss(self, *args, **kwargs):
        warnings.warn("This is strange", stacklevel=1)
        return super().compute_loss(*args, **kwargs)


def _train(count):
    with scope(count):
        model = WarnsInItsStep([layers.Input((4,)), Warns(), layers.Dense(1)])
        # Each step runs in Python: there are no traces to count.
        model.compile("sgd", "mse", run_eagerly=True)
    data = models.table(12)
    # What is built is called once more, without data.
    model.fit(**data, batch_size=6, verbose=0)
    with pytest.warns(UserWarning) as caught:
        warnings.simplefilter("always")
        model.fit(**data, batch_size=6, verbose=0)
    texts = [str(w.message) for w in caught if "This is" in str(w.message)]
    files = {w.filename for w in caught if "strange" in str(w.message)}
    assert files == {__file__}
    return {text: texts.count(text) for text in set(texts)}


@pytest.mark.filterwarnings("ignore:This is")
def test_fit():
    assert _train(3) == _train(None)


def test_run():
    strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])

    def replica_fn():
        warnings.warn("This is odd", stacklevel=1)
        return keras.ops.ones(())

    for _ in range(2):
        with pytest.warns(UserWarning, match="This is odd") as caught:
            strategy.run(replica_fn)
        odd = [w for w in caught if "This is odd" in str(w.message)]
        assert [w.filename for w in odd] == [__file__]

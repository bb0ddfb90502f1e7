"""An optimizer whose variables the first step makes trains, or is refused."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_dist
from parity.harness import assert_same
from parity.harness import state_of

X = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")


class TwoOptimizers(keras.Model):
    """Its second optimizer is not built before training."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2, kernel_initializer="ones")
        self.dense.build((None, 3))

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, *_ = keras.utils.unpack_x_y_sample_weight(data)

        def loss():
            return keras_dist.compute_average_loss(
                ops.sum(ops.square(self(x)), axis=1)
            )

        weights = self.dense.trainable_variables
        self.second.apply(keras_dist.gradient(loss, weights), weights)
        return {"mean": ops.mean(x)}


def trained(strategy=None):
    def made():
        model = TwoOptimizers()
        model.compile("sgd")
        model.second = keras.optimizers.Adam(0.1)
        return model

    if strategy is None:
        model = made()
    else:
        with strategy.scope():
            model = made()
    model.fit(X, batch_size=6, epochs=2, shuffle=False, verbose=0)
    return model


@pytest.mark.skipif(
    keras.backend.backend() == "jax",
    reason="On JAX, a step that makes variables is an error.",
)
@pytest.mark.parametrize("count", [2, 3])
def test_its_variables_are_the_strategy_s(count):
    strategy = keras_dist.MirroredStrategy([f"cpu:{i}" for i in range(count)])
    model = trained(strategy)
    slots = model.second.variables
    assert len(slots) == 6
    for variable in slots:
        assert variable.distribute_strategy is strategy
    assert_same(state_of(model), state_of(trained()))


@pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="Other backends make them."
)
def test_on_jax_it_is_an_error():
    strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(keras_dist.UnsupportedModelError, match="made variab"):
        trained(strategy)

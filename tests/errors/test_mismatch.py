"""Things of one strategy used under another: early, named errors."""

import keras
import numpy as np
import pytest

import keras_dist

X = np.ones((4, 3), "float32")
Y = np.ones((4, 2), "float32")


@pytest.fixture
def strategies():
    return (
        keras_dist.MirroredStrategy(["cpu:0", "cpu:1"]),
        keras_dist.MirroredStrategy(["cpu:2", "cpu:3"]),
    )


def make_model():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])


def test_a_model_of_another_strategy(strategies):
    first, second = strategies
    with first.scope():
        model = make_model()
    with pytest.raises(keras_dist.StrategyMismatchError, match=model.name):
        second.distribute(model)


def test_a_layer_of_another_strategy(strategies):
    first, second = strategies
    with first.scope():
        layer = keras.layers.Dense(2, name="borrowed")
        layer.build((None, 3))
    with second.scope():
        model = keras.Sequential([keras.Input((3,)), layer])
    model.compile("sgd", "mse")
    with pytest.raises(
        keras_dist.StrategyMismatchError, match="borrowed/kernel.*cpu:0.*cpu:2"
    ):
        model.fit(X, Y, verbose=0)
    np.testing.assert_array_equal(layer.kernel.shape, (3, 2))


def test_an_optimizer_of_another_strategy(strategies):
    first, second = strategies
    with first.scope():
        optimizer = keras.optimizers.Adam()
    with second.scope():
        model = make_model()
    model.compile(optimizer, "mse")
    with pytest.raises(keras_dist.StrategyMismatchError, match="adam"):
        model.fit(X, Y, verbose=0)


def test_a_variable_of_another_strategy(strategies):
    first, second = strategies
    with first.scope():
        variable = keras.Variable([1.0], name="theirs")
    with pytest.raises(keras_dist.StrategyMismatchError, match="theirs"):
        second.devices_of(variable)


@pytest.mark.smoke
def test_an_absent_device():
    with pytest.raises(keras_dist.DeviceError, match="'cpu:9'"):
        keras_dist.MirroredStrategy(["cpu:0", "cpu:9"])


@pytest.mark.parametrize("in_scope", ["compile", "optimizer"])
def test_a_model_made_outside_with_a_part_made_inside(in_scope):
    strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    model = make_model()
    if in_scope == "compile":
        with strategy.scope():
            model.compile("adam", "mse")
    else:
        with strategy.scope():
            optimizer = keras.optimizers.Adam()
        model.compile(optimizer, "mse")
    before = model.get_weights()
    with pytest.raises(
        keras_dist.StrategyMismatchError,
        match=f"'{model.name}' was made outside of any scope.*distribute",
    ):
        model.fit(X, Y, verbose=0)
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)
    # What the message says to do.
    strategy.distribute(model).fit(X, Y, verbose=0)
    assert not np.array_equal(model.get_weights()[0], before[0])

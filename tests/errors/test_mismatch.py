"""What belongs to one strategy is refused by another, early and by name."""

import keras
import numpy as np
import pytest

from errors.helpers import X
from errors.helpers import Y
from errors.helpers import assert_weights
from errors.helpers import make_model
from errors.helpers import mirrored
from errors.helpers import mismatch


def test_what_belongs_to_another_strategy_is_named():
    first, second = (mirrored(f"cpu:{i}", f"cpu:{i + 1}") for i in (0, 2))
    with first.scope():
        model = make_model()
        layer = keras.layers.Dense(1, name="borrowed")
        layer.build((None, 3))
        optimizer = keras.optimizers.Adam()
        variable = keras.Variable([1.0], name="theirs")
    with mismatch(model.name):
        second.distribute(model)
    with mismatch("theirs"):
        second.devices_of(variable)
    with second.scope():
        borrowing = keras.Sequential([keras.Input((3,)), layer])
        model = make_model()
    borrowing.compile("sgd", "mse")
    with mismatch("borrowed/kernel.*cpu:0.*cpu:2"):
        borrowing.fit(X, Y, verbose=0)
    np.testing.assert_array_equal(layer.kernel.shape, (3, 1))
    model.compile(optimizer, "mse")
    with mismatch("adam"):
        model.fit(X, Y, verbose=0)


@pytest.mark.parametrize("in_scope", ["compile", "optimizer"])
def test_a_model_made_outside_with_a_part_made_inside(in_scope):
    strategy = mirrored()
    model = make_model()
    with strategy.scope():
        optimizer = keras.optimizers.Adam()
        if in_scope == "compile":
            model.compile("adam", "mse")
    if in_scope == "optimizer":
        model.compile(optimizer, "mse")
    before = model.get_weights()
    with mismatch(f"'{model.name}' was made outside of any scope.*distribute"):
        model.fit(X, Y, verbose=0)
    assert_weights(model, before)
    # What the message says to do.
    strategy.distribute(model).fit(X, Y, verbose=0)
    assert not np.array_equal(model.get_weights()[0], before[0])

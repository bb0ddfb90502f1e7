"""Draws that are the same for each row, whatever rows there are."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_dist
from keras_dist.fit import hooks as seams
from keras_dist.fit.draws import equal_draws
from keras_dist.internals import keras_random
from keras_dist.verification import verify as trial
from verification import models

DRAWS = {
    "normal": lambda n: keras.random.normal((n, 3, 4), seed=1),
    "uniform": lambda n: keras.random.uniform((n, 4), seed=1),
    "truncated_normal": lambda n: keras.random.truncated_normal((n,), seed=1),
    "randint": lambda n: keras.random.randint((n, 4), 0, 9, seed=1),
    "gamma": lambda n: keras.random.gamma((n, 4), 0.5, seed=1),
    "binomial": lambda n: keras.random.binomial((n, 4), 9.0, 0.5, seed=1),
    "beta": lambda n: keras.random.beta((n, 4), 0.5, 0.5, seed=1),
    "dropout": lambda n: keras.random.dropout(ops.ones((n, 8)), 0.5, seed=1),
    "categorical": lambda n: keras.random.categorical(
        ops.zeros((n, 5)), 3, seed=1
    ),
}


def numbers(draw, rows):
    return keras.ops.convert_to_numpy(draw(rows))


@pytest.mark.parametrize("name", DRAWS)
def test_each_row_has_the_same_however_many_there_are(name):
    with equal_draws() as drawn:
        few, many = numbers(DRAWS[name], 2), numbers(DRAWS[name], 7)
    assert name in drawn
    assert many.shape[0] == 7
    np.testing.assert_array_equal(many, np.broadcast_to(few[:1], many.shape))
    if few.ndim > 1:
        assert len(np.unique(few[0])) > 1
    again = numbers(DRAWS[name], 7)
    if name not in ("categorical", "dropout"):
        assert len(np.unique(again.reshape(7, -1)[:, 0])) > 1


def test_everything_is_put_back():
    module = keras_random.random_backend
    before = {name: getattr(module, name) for name in DRAWS}
    with pytest.raises(ZeroDivisionError), equal_draws():
        assert module.normal is not before["normal"]
        raise ZeroDivisionError
    assert {name: getattr(module, name) for name in DRAWS} == before


def test_rows_keep_their_order():
    x = ops.arange(9)
    with equal_draws():
        shuffled = keras.random.shuffle(x, seed=1)
    assert ops.convert_to_numpy(shuffled).tolist() == list(range(9))


def test_seams_are_installed_before_anything_is_replaced(monkeypatch):
    order = []
    monkeypatch.setattr(seams, "install", lambda: order.append("seams"))
    hooks = trial.equal_draws

    def noted():
        order.append("draws")
        return hooks()

    monkeypatch.setattr(trial, "equal_draws", noted)
    strategy = keras_dist.OneDeviceStrategy("cpu:0")
    x = np.ones((4, 6), "float32")
    assert strategy.verify(models.regressor(), x, x[:, :2], steps=1).same
    assert order.index("seams") < order.index("draws")

"""The first `fit` under a strategy says in one line what happens."""

import keras
import numpy as np
import pytest

import keras_dist
from parity.harness import BACKEND

X, Y = np.ones((107, 3), "float32"), np.ones((107, 1), "float32")


def made(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def mirrored():
    return keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])


def lines(capsys):
    """What was printed of ours."""
    printed = capsys.readouterr().out.splitlines()
    return [line for line in printed if "keras_dist" in line]


def test_the_first_fit_of_a_strategy_says_what_happens(capsys):
    strategy = mirrored()
    model = made(strategy)
    model.fit(X, Y, batch_size=50, verbose=0)
    model.evaluate(X, Y, verbose=2)
    assert lines(capsys) == []
    model.fit(X, Y, batch_size=50, verbose=2)
    assert lines(capsys) == [
        f"keras_dist on {BACKEND}: MirroredStrategy on cpu:0, cpu:1; 2 "
        "replicas; 1 worker; global batches of 50 rows, 25 per replica; each "
        "batch is split by rows"
    ]
    model.fit(X, Y, verbose=2)
    made(strategy).fit(X, Y, verbose=2)
    assert lines(capsys) == []
    made(mirrored()).fit(X, Y, verbose=2)
    assert len(lines(capsys)) == 1


def test_rows_are_those_of_the_data(capsys):
    made(mirrored()).fit(X[:7], Y[:7], verbose=2)
    assert "global batches of 7 rows, 3 to 4 per replica" in lines(capsys)[0]
    one = keras_dist.OneDeviceStrategy("cpu:1")
    made(one).fit({"x": X}["x"], Y, verbose=2)
    (line,) = lines(capsys)
    assert line.endswith("on cpu:1; 1 replica; 1 worker; batches of 32 rows")


def test_steps_of_the_users_are_told_what_compares_them(capsys):
    class Own(keras.Sequential):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    def fit(strategy):
        with strategy.scope():
            model = Own([keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(X, Y, verbose=2)
        return lines(capsys)[-1]

    told = "`strategy.verify` compares your `compute_loss` with one device"
    assert fit(mirrored()).endswith(told)
    assert told not in fit(keras_dist.OneDeviceStrategy("cpu:0"))


def test_data_that_makes_its_batches_is_not_read_for_it(capsys):
    class Counted(keras.utils.PyDataset):
        reads = 0

        def __len__(self):
            return 2

        def __getitem__(self, index):
            type(self).reads += 1
            return X[:6], Y[:6]

    made(keras_dist.OneDeviceStrategy("cpu:0")).fit(Counted(), verbose=2)
    plain, Counted.reads = Counted.reads, 0
    made(mirrored()).fit(Counted(), verbose=2)
    assert "batch size set by the data" in lines(capsys)[-1]
    assert Counted.reads == plain


def test_it_can_be_switched_off(capsys, monkeypatch):
    with pytest.raises(TypeError, match="epoch_count"):
        made(mirrored()).fit(X, Y, epoch_count=1)
    with monkeypatch.context() as patch:
        patch.setenv("KERAS_DIST_BANNER", "0")
        made(mirrored()).fit(X, Y, verbose=2)
    keras.config.disable_interactive_logging()
    try:
        made(mirrored()).fit(X, Y, verbose=2)
    finally:
        keras.config.enable_interactive_logging()
    assert lines(capsys) == []

"""A model of no strategy that is used in a scope is told of, once.

Every other warning is an error, here as in all tests.
"""

import keras
import pytest

import keras_dist
from errors import helpers
from errors.helpers import CALLS
from errors.helpers import KINDS
from errors.helpers import SEVERAL
from errors.helpers import X
from errors.helpers import Y
from errors.helpers import make_model
from errors.helpers import mirrored


def make_plain(kind=keras.Sequential):
    return make_model(kind, "adam")


def warned():
    return pytest.warns(UserWarning, match="runs on one device")


def told(caught):
    return [w for w in caught if "s on one device" in str(w.message)]


@pytest.mark.parametrize("kind", SEVERAL)
@pytest.mark.parametrize("name", CALLS)
def test_it_is_told_once(name, kind):
    strategy = KINDS[kind]()
    model = make_plain()
    with pytest.warns(UserWarning) as caught, strategy.scope():
        CALLS[name](model)
        CALLS[name](model)
        model.fit(X, Y, verbose=0)
    (warning,) = told(caught)
    message = str(warning.message)
    assert f"Model '{model.name}'" in message
    assert repr(strategy) in message
    assert "strategy.distribute(model)" in message
    assert warning.filename == helpers.__file__


# Keras builds an unbuilt model for `predict` on JAX as users do, by calling it.
MAKING = [(name, True) for name in CALLS] + [
    (name, False) for name in CALLS if not name.startswith("predict")
]


@pytest.mark.parametrize("kind", SEVERAL)
@pytest.mark.parametrize(("name", "is_built"), MAKING)
def test_what_it_makes_belongs_to_no_strategy(name, is_built, kind):
    """On TensorFlow, and where it is not built, its first batch makes it."""
    inputs = [keras.Input((3,))] if is_built else []
    model = keras.Sequential([*inputs, keras.layers.Dense(1)])
    optimizer = keras.optimizers.Nadam()
    model.compile(optimizer, "mse", metrics=["mae"])
    with warned(), KINDS[kind]().scope():
        CALLS[name](model)
        made = [*model.weights, *optimizer.variables]
        made += model.metrics_variables
        assert not [v for v in made if "distribute_strategy" in vars(v)]
        CALLS["fit"](model)
    CALLS["fit"](model)
    model.compile(optimizer, "mse")
    CALLS["fit"](model)


class Own(keras.Sequential):
    def test_step(self, *args):
        return super().test_step(*args)


def test_one_that_has_trained_before_or_has_its_own_step():
    trained, own = make_plain(), make_plain(Own)
    CALLS["fit"](trained)
    for call, model in (("fit", trained), ("evaluate", own)):
        with warned(), mirrored().scope():
            CALLS[call](model)


def test_one_that_comes_from_a_distributed_one_is_told_once():
    strategy = mirrored()
    with strategy.scope():
        config = make_plain().get_config()
    model = keras.Sequential.from_config(config)
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="one device") as caught:
        with strategy.scope():
            model.fit(X, Y, verbose=0)
        model.fit(X, Y, verbose=0)
    assert len(told(caught)) == 1


@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_concern(name):
    """One replica, a model of the strategy, and no scope."""
    for strategy in (
        keras_dist.OneDeviceStrategy("cpu:1"),
        mirrored("cpu:1"),
    ):
        model = make_plain()
        with strategy.scope():
            CALLS[name](model)
    strategy, plain = mirrored(), make_plain()
    CALLS[name](plain)
    with strategy.scope():
        CALLS[name](make_plain())
        CALLS[name](strategy.distribute(plain))

"""Models of no strategy that are used while a scope is open: a warning.

Every other warning is an error, here as in all tests.
"""

import keras
import numpy as np
import pytest

import keras_dist

X = np.ones((4, 3), "float32")
Y = np.zeros((4, 1), "float32")
CALLS = {
    "fit": lambda model: model.fit(X, Y, verbose=0),
    "evaluate": lambda model: model.evaluate(X, Y, verbose=0),
    "predict": lambda model: model.predict(X, verbose=0),
    "train_on_batch": lambda model: model.train_on_batch(X, Y),
    "test_on_batch": lambda model: model.test_on_batch(X, Y),
    "predict_on_batch": lambda model: model.predict_on_batch(X),
}
KINDS = ["MirroredStrategy", "CentralStorageStrategy"]


def make_strategy(kind="MirroredStrategy", devices=("cpu:0", "cpu:1")):
    return getattr(keras_dist, kind)(list(devices))


def make_model(kind=keras.Sequential):
    model = kind([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def told(caught):
    return [w for w in caught if "s on one device" in str(w.message)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_it_is_told_once(name, kind):
    strategy = make_strategy(kind)
    model = make_model()
    with pytest.warns(UserWarning) as caught, strategy.scope():
        CALLS[name](model)
        CALLS[name](model)
        model.fit(X, Y, verbose=0)
    (warning,) = told(caught)
    message = str(warning.message)
    assert f"Model '{model.name}'" in message
    assert repr(strategy) in message
    assert "strategy.distribute(model)" in message
    assert warning.filename == __file__


# Keras builds an unbuilt model for `predict` on JAX as users do, by calling it.
MAKING = [(name, True) for name in CALLS] + [
    (name, False) for name in CALLS if not name.startswith("predict")
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "is_built"), MAKING)
def test_what_it_makes_belongs_to_no_strategy(name, is_built, kind):
    """On TensorFlow, and where it is not built, its first batch makes it."""
    inputs = [keras.Input((3,))] if is_built else []
    model = keras.Sequential([*inputs, keras.layers.Dense(1)])
    optimizer = keras.optimizers.Nadam()
    model.compile(optimizer, "mse", metrics=["mae"])
    with (
        pytest.warns(UserWarning, match="runs on one device"),
        make_strategy(kind).scope(),
    ):
        CALLS[name](model)
        made = [
            *model.weights,
            *optimizer.variables,
            *model.metrics_variables,
        ]
        assert not [v for v in made if "distribute_strategy" in vars(v)]
        CALLS["fit"](model)
    CALLS["fit"](model)
    model.compile(optimizer, "mse")
    CALLS["fit"](model)


def test_one_that_has_trained_before_the_scope():
    model = make_model()
    CALLS["fit"](model)
    with (
        pytest.warns(UserWarning, match="runs on one device"),
        make_strategy().scope(),
    ):
        CALLS["fit"](model)


def test_one_whose_step_is_its_own():
    class Own(keras.Sequential):
        def test_step(self, *args):
            return super().test_step(*args)

    model = make_model(Own)
    with (
        pytest.warns(UserWarning, match="runs on one device"),
        make_strategy().scope(),
    ):
        CALLS["evaluate"](model)


def test_one_that_comes_from_a_distributed_one_is_told_once():
    strategy = make_strategy()
    with strategy.scope():
        config = make_model().get_config()
    model = keras.Sequential.from_config(config)
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="one device") as caught:
        with strategy.scope():
            model.fit(X, Y, verbose=0)
        model.fit(X, Y, verbose=0)
    assert len(told(caught)) == 1


def one_device():
    return keras_dist.OneDeviceStrategy("cpu:1")


def one_replica():
    return make_strategy(devices=["cpu:1"])


@pytest.mark.parametrize("make", [one_device, one_replica])
@pytest.mark.parametrize("name", CALLS)
def test_one_replica_is_no_concern(make, name):
    model = make_model()
    with make().scope():
        CALLS[name](model)


@pytest.mark.parametrize("name", CALLS)
def test_a_model_of_the_strategy_is_none(name):
    strategy = make_strategy()
    plain = make_model()
    with strategy.scope():
        CALLS[name](make_model())
        CALLS[name](strategy.distribute(plain))


@pytest.mark.parametrize("name", CALLS)
def test_outside_of_the_scope_it_is_none(name):
    make_strategy()
    CALLS[name](make_model())

"""`strategy.verify` refuses what it can't compare, and says the way out."""

import itertools
import pickle
import re

import keras
import numpy as np
import pytest

import keras_dist
from keras_dist.verification.copies import maker_of
from verification import models
from verification.models import TARGETS
from verification.models import X
from verification.steps import Adversarial


@pytest.fixture
def strategy():
    return keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])


def _own_compile():
    model = Adversarial()
    model.compile("adam", keras.optimizers.SGD())
    return model


def _without_config():
    class Wide(keras.Model):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def call(self, x):
            return self.layer(x)

    model = Wide(lambda x: x)
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: keras.Sequential([keras.layers.Dense(1)]),
            "which is not compiled. Call `model.compile(...)` first",
        ),
        (_own_compile, "has no `get_compile_config`"),
        (_without_config, "strategy.verify(make_model, x, y)"),
        (lambda: "a model", "Received: 'a model' of type str"),
        (lambda: lambda: None, "has to return a compiled `keras.Model`"),
    ],
)
def test_a_model_that_has_no_copy_is_refused(strategy, make, says):
    with pytest.raises(keras_dist.UnsupportedModelError, match=re.escape(says)):
        strategy.verify(make(), X, TARGETS)


@keras.saving.register_keras_serializable("first_of_two")
class Own(keras.layers.Layer):
    def call(self, x):
        return 2.0 * x


def _own(factor):
    class Own(keras.layers.Layer):
        def call(self, x):
            return x * factor

    return Own


def _activation(factor):
    def own(x):
        return x * factor

    return own


def _initializer(value):
    class Own(keras.initializers.Initializer):
        def __call__(self, shape, dtype=None):
            return keras.ops.full(shape, value, dtype)

    return keras.layers.Dense(4, kernel_initializer=Own())


OF_ONE_NAME = {
    "layers": lambda factor: _own(factor)(),
    "initializers": _initializer,
    "activations": lambda factor: keras.layers.Dense(
        4, activation=_activation(factor)
    ),
}


@pytest.mark.parametrize("kind", OF_ONE_NAME)
def test_what_shares_a_name_is_not_mixed_up(strategy, kind):
    layers = [OF_ONE_NAME[kind](factor) for factor in (2.0, 0.5)]

    def compiled():
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile("sgd", "mse")
        return model

    with pytest.raises(
        keras_dist.UnsupportedModelError, match="a name of its own"
    ) as raised:
        strategy.verify(compiled(), X, X)
    assert "pass `verify` the function" in str(raised.value)


def test_registered_classes_of_one_name_are_told_apart():
    first, second = Own, _own(0.5)
    model = keras.Sequential(
        [keras.Input((6,)), second(), first(), keras.layers.Dense(2)]
    )
    model.compile("sgd", "mse")
    kinds = [type(layer) for layer in maker_of(model)().layers]
    assert kinds[:2] == [second, first]


def test_a_function_has_to_make_the_same_model_again(strategy):
    sizes = itertools.count(1)

    def make():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(next(sizes))]
        )
        model.compile("sgd", "mse")
        return model

    with pytest.raises(keras_dist.UnsupportedModelError, match="they differ"):
        strategy.verify(make, X, TARGETS)


def test_arrays_without_numbered_rows_are_refused(strategy):
    class Sparse:
        shape = (8, 6)

    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        tensor = tf.sparse.from_dense(X)
    else:
        tensor = Sparse()
    says = f"Received: {type(tensor).__name__}, .*Expected: arrays, or data in"
    with pytest.raises(TypeError, match=f"(?s){says}"):
        strategy.verify(models.regressor(), tensor, TARGETS)


def test_inside_of_a_scope_nothing_is_plain(strategy):
    model = models.regressor()
    with (
        strategy.scope(),
        pytest.raises(RuntimeError, match="Call it after the `with"),
    ):
        strategy.verify(model, X, TARGETS)


@pytest.mark.parametrize(
    ("data", "options", "says"),
    [
        ((X[:0], TARGETS[:0]), {}, "arrays without rows"),
        ((X, TARGETS), {"steps": 0}, "Expected: an integer of at least 1"),
        (([],), {}, "has no batches"),
        (([("a", "b")],), {}, "whose first axis is the rows"),
    ],
)
def test_data_without_rows_is_refused(strategy, data, options, says):
    with pytest.raises(ValueError, match=f"(?s){says}"):
        strategy.verify(models.regressor(), *data, **options)


def test_what_fails_on_one_device_is_raised(strategy):
    names = keras.layers.Dense(1).name
    with pytest.raises(ValueError):
        strategy.verify(models.regressor(), np.ones((8, 5)), TARGETS[:8])
    number = int(names.partition("_")[2] or 0)
    # Nor has it used up names.
    assert keras.layers.Dense(1).name == f"dense_{number + 1}"


def test_the_error_is_an_assertion_and_travels():
    error = keras_dist.NumbersDifferError("loss 'loss' differs.")
    assert isinstance(error, AssertionError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)

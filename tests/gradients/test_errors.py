"""What can't be differentiated is refused, in words that say what to do."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_dist
from keras_dist.plugin.backend import override_backend
from keras_dist.testing.memory import MemoryBackend


def test_an_empty_list_says_that_the_model_is_not_built():
    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="probably not built yet"):
        keras_dist.value_and_grad(lambda: 1.0, model.trainable_variables)


@pytest.mark.parametrize(
    "thing", ["v", None, True, {"a": 1.0}, keras.KerasTensor((2,))]
)
@pytest.mark.parametrize("in_list", [False, True])
def test_things_that_are_no_variables(thing, in_list):
    with pytest.raises(TypeError, match="Can't differentiate with respect to"):
        keras_dist.gradient(lambda x: x, [thing] if in_list else thing)


def test_a_nested_list():
    v = keras.Variable(1.0)
    with pytest.raises(TypeError, match="keras.tree.flatten"):
        keras_dist.gradient(lambda: v, [[v]])


def test_integers():
    v = keras.Variable(1, dtype="int32", trainable=False, name="counter")
    with pytest.raises(ValueError, match="'counter' of dtype 'int32'"):
        keras_dist.gradient(lambda: 1.0, [v])
    with pytest.raises(ValueError, match="a tensor of dtype"):
        keras_dist.gradient(lambda x: 1.0, np.array([1, 2]))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (lambda v: v * ops.ones((2, 3)), r"shape \(2, 3\) and dtype 'float32'"),
        (lambda v: ops.cast(v, "int32"), r"shape \(\) and dtype 'int32'"),
        (lambda v: None, "None of type NoneType"),
        (lambda v: (v, v), "of type tuple"),
    ],
)
def test_values_that_are_no_scalars(value, text):
    v = keras.Variable(1.0)
    with pytest.raises(ValueError, match=text):
        keras_dist.value_and_grad(lambda: value(v.value), v)


def test_a_vector_names_what_reduces_it():
    v = keras.Variable([1.0, 2.0])
    with pytest.raises(ValueError, match="compute_average_loss"):
        keras_dist.gradient(lambda: v * 2.0, v)
    with pytest.raises(ValueError, match="leave out has_aux"):
        keras_dist.gradient(lambda: v * 2.0, v, has_aux=True)


def test_the_functions_own_error_comes_through_and_scopes_are_closed():
    v, w = keras.Variable(1.0), keras.Variable(0.0, trainable=False)

    def fn():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        keras_dist.gradient(fn, [v, w])
    assert float(keras_dist.gradient(lambda: v * v, v)) == 2.0


def test_a_backend_that_can_not():
    v = keras.Variable(1.0)
    with (
        override_backend(MemoryBackend()),
        pytest.raises(TypeError, match="MemoryBackend cannot differentiate"),
    ):
        keras_dist.gradient(lambda: v * v, v)

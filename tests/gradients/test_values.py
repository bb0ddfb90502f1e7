"""Gradients are what is known by hand, on one device."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_dist
from gradients.helpers import BACKEND
from gradients.helpers import array


def test_value_and_gradient_of_variables():
    a, b = keras.Variable([1.0, 2.0]), keras.Variable(3.0)
    value, grads = keras_dist.value_and_grad(lambda: ops.sum(a * a) * b, [a, b])
    assert float(value) == 15.0
    assert isinstance(grads, list)
    assert [array(g).tolist() for g in grads] == [[6.0, 12.0], 5.0]


def test_a_single_variable_has_a_single_gradient():
    v = keras.Variable(3.0)
    value, grad = keras_dist.value_and_grad(lambda: v * v, v)
    assert (float(value), float(grad)) == (9.0, 6.0)
    assert float(keras_dist.gradient(lambda: v * v, v)) == 6.0
    # One that is named twice has it twice, and nothing is left in it.
    grads = keras_dist.gradient(lambda: v * v, (v, v))
    assert [float(g) for g in grads] == [6.0, 6.0]
    assert getattr(v.value, "grad", None) is None


def test_aux_comes_back_as_it_is():
    v, thing = keras.Variable(3.0), object()

    def fn():
        return v * v, {"v": v + 1.0, "things": [thing, None, "text", 7]}

    (value, aux), grads = keras_dist.value_and_grad(fn, [v], has_aux=True)
    assert (float(value), float(grads[0])) == (9.0, 6.0)
    assert float(aux["v"]) == 4.0
    assert aux["things"] == [thing, None, "text", 7]
    grads, aux = keras_dist.gradient(fn, [v], has_aux=True)
    assert float(grads[0]) == 6.0 and aux["things"][0] is thing


def test_what_is_not_used_has_no_gradient():
    used, unused = keras.Variable(2.0), keras.Variable(2.0)
    grads = keras_dist.gradient(lambda: used * 3.0, [unused, used])
    assert grads[0] is None and float(grads[1]) == 3.0
    for constant in (1.0, np.float32(1.0), ops.ones(())):
        assert keras_dist.gradient(lambda c=constant: c, [unused]) == [None]


def test_tensors_are_arguments_between_variables():
    v, w = keras.Variable(2.0), keras.Variable(5.0)
    x = ops.convert_to_tensor([1.0, 3.0])
    value, grads = keras_dist.value_and_grad(
        lambda x, y: ops.sum(x * x) * v * y + w,
        [v, x, w, np.array(0.5, "float32")],
    )
    assert float(value) == 15.0
    expected = [5.0, [2.0, 6.0], 1.0, 20.0]
    assert [array(g).tolist() for g in grads] == expected
    # What is closed over is no argument.
    grad = keras_dist.gradient(lambda own: ops.sum(own * x), x)
    assert array(grad).tolist() == [1.0, 3.0]


@pytest.mark.parametrize("x", [2, 2.0, np.float32(2.0), np.array(2.0, "f4")])
def test_numbers_and_arrays_are_made_tensors(x):
    assert float(keras_dist.gradient(lambda x: x**3, x)) == 12.0


def test_derivatives_of_derivatives():
    def slope(x):
        return keras_dist.gradient(lambda x: x**3, x)

    assert float(slope(2.0)) == 12.0
    assert float(keras_dist.gradient(slope, 2.0)) == 12.0
    third = keras_dist.gradient(lambda x: keras_dist.gradient(slope, x), 2.0)
    assert float(third) == 6.0


def test_a_variable_that_is_not_trainable():
    v = keras.Variable(3.0, trainable=False)
    w = keras.Variable(2.0)

    def fn():
        value = v * v * w
        v.assign(10.0)
        return value, v + 1.0

    (value, read), grads = keras_dist.value_and_grad(fn, [v, w], has_aux=True)
    assert (float(value), float(read)) == (18.0, 11.0)
    assert [float(g) for g in grads] == [12.0, 9.0]
    assert float(array(v)) == 10.0


@pytest.mark.skipif(
    BACKEND != "torch", reason="Only PyTorch keeps graphs in tensors."
)
def test_values_hold_no_graph():
    v = keras.Variable(3.0)
    (value, aux), grad = keras_dist.value_and_grad(
        lambda: (v * v, [v * 2.0]), v, has_aux=True
    )
    assert not value.requires_grad
    assert not aux[0].requires_grad
    assert not grad.requires_grad


def test_rows_of_an_embedding():
    layer = keras.layers.Embedding(4, 2)
    layer.build()
    before = array(layer.embeddings)
    grads = keras_dist.gradient(
        lambda: ops.sum(layer(np.array([1, 1, 3]))), layer.trainable_variables
    )
    keras.optimizers.SGD(1.0).apply(grads, layer.trainable_variables)
    change = before - array(layer.embeddings)
    expected = [[0.0] * 2, [2.0] * 2, [0.0] * 2, [1.0] * 2]
    np.testing.assert_allclose(change, expected, atol=1e-6)


def test_gradients_by_inputs_of_an_embedding_are_dense():
    table = ops.convert_to_tensor(np.ones((4, 2), "float32"))
    grad = keras_dist.gradient(
        lambda table: ops.sum(ops.take(table, np.array([1, 1, 3]), axis=0)),
        table,
    )
    assert array(grad)[:, 0].tolist() == [0.0, 2.0, 0.0, 1.0]

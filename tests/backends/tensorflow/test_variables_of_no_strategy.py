"""Optimizers of a strategy train variables that have one copy only."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import optimizers

import keras_dist

VALUE = np.array([[1.0, 2.0], [3.0, 4.0]], "float32")
GRADIENT = np.array([[2.0, -1.0], [0.5, 3.0]], "float32")
OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.5),
    "adam": lambda: optimizers.Adam(0.5),
}


def mirrored_of():
    return keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])


def central_of():
    return keras_dist.CentralStorageStrategy(["cpu:0", "cpu:1"])


def dense(factor):
    return tf.constant(GRADIENT) * factor


def sparse(factor):
    rows = tf.constant(GRADIENT[[1, 0, 1]]) * factor
    return tf.IndexedSlices(rows, tf.constant([1, 0, 1]), tf.constant([2, 2]))


def apply_in_the_scope(strategy, optimizer, variables, gradient):
    with strategy.scope():
        apply_outside(strategy, optimizer, variables, gradient)


def apply_outside(strategy, optimizer, variables, gradient):
    for factor in (1.0, 2.0, 3.0):
        optimizer.apply([gradient(factor) for _ in variables], variables)


def apply_in_run(strategy, optimizer, variables, gradient, decorator=None):
    def step(factor):
        # The replicas' gradients are added up.
        gradients = [gradient(factor / 2) for _ in variables]
        optimizer.apply(gradients, variables)

    def run(factor):
        strategy.run(step, args=(factor,))

    for factor in (1.0, 2.0, 3.0):
        (decorator or (lambda fn: fn))(run)(tf.constant(factor))


def apply_in_a_function(strategy, optimizer, variables, gradient):
    apply_in_run(strategy, optimizer, variables, gradient, keras_dist.function)


def apply_in_fit(strategy, optimizer, variables, gradient):
    class Model(keras.Model):
        def train_step(self, data):
            x, _ = data
            with tf.GradientTape() as tape:
                total = sum(tf.reduce_sum(dense(1.0) * v) for v in variables)
                loss = tf.reduce_mean(x) * total
            optimizer.apply(tape.gradient(loss, variables), variables)
            return {"loss": loss}

    with strategy.scope():
        model = Model()
        model.compile(optimizer)
    for factor in (1.0, 2.0, 3.0):
        x = np.full((4, 1), factor, "float32")
        model.fit(x, x, batch_size=4, verbose=0)


WAYS = [
    (apply_in_the_scope, dense),
    (apply_in_the_scope, sparse),
    (apply_outside, dense),
    (apply_in_run, dense),
    (apply_in_a_function, dense),
    (apply_in_fit, dense),
]


def expected(name, gradient, count):
    variables = [tf.Variable(VALUE) for _ in range(count)]
    apply_outside(None, OPTIMIZERS[name](), variables, gradient)
    return variables[0].numpy()


@pytest.mark.parametrize("make", [mirrored_of, central_of])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("among", ["alone", "beside one of the strategy"])
@pytest.mark.parametrize(("way", "gradient"), WAYS)
def test_a_native_variable(make, name, among, way, gradient):
    strategy, variables = make(), [tf.Variable(VALUE)]
    with strategy.scope():
        if among != "alone":
            variables.insert(0, keras.Variable(VALUE))
        optimizer = OPTIMIZERS[name]()
    way(strategy, optimizer, variables, gradient)
    for variable in variables:
        np.testing.assert_allclose(
            np.asarray(tf.convert_to_tensor(variable)),
            expected(name, gradient, len(variables)),
            rtol=1e-6,
        )


@pytest.mark.parametrize("built", ["not yet", "in the scope", "outside"])
@pytest.mark.parametrize("way", [apply_in_run, apply_in_the_scope])
def test_an_optimizer_from_outside(built, way):
    strategy, variables = mirrored_of(), [tf.Variable(VALUE)]
    optimizer = optimizers.Adam(0.5)
    if built == "outside":
        optimizer.build(variables)
    if built == "in the scope":
        with strategy.scope():
            optimizer.build(variables)
    way(strategy, optimizer, variables, dense)
    np.testing.assert_allclose(
        variables[0].numpy(), expected("adam", dense, 1), rtol=1e-6
    )


@pytest.mark.parametrize("way", [apply_in_the_scope, apply_outside])
def test_a_keras_variable(way):
    strategy, variables = mirrored_of(), [keras.Variable(VALUE)]
    with strategy.scope():
        variables.append(keras.Variable(VALUE))
        optimizer = optimizers.Adam(0.5)
    way(strategy, optimizer, variables, dense)
    for variable in variables:
        np.testing.assert_allclose(
            variable.numpy(), expected("adam", dense, 2), rtol=1e-6
        )


def test_after_the_session_was_cleared_in_the_scope():
    with mirrored_of().scope():
        keras.utils.clear_session()
        variables = [keras.Variable(VALUE), tf.Variable(VALUE)]
        apply_outside(None, optimizers.Adam(0.5), variables, dense)
    np.testing.assert_allclose(
        variables[1].numpy(), expected("adam", dense, 2), rtol=1e-6
    )

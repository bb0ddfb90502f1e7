"""Optimizers train variables in and out of replicas as plain Keras does.

The variables may be native ones, and of no strategy.
"""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import optimizers

import keras_dist
from parity.harness import central
from parity.harness import strategy as strategy_of

VALUE = np.array([[1.0, 2.0], [3.0, 4.0]], "float32")
GRADIENT = np.array([[2.0, -1.0], [0.5, 3.0]], "float32")
FACTORS = (1.0, 2.0, 3.0)
OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda: optimizers.Adam(0.1),
    "accumulated": lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "average": lambda: optimizers.SGD(
        0.1, use_ema=True, ema_overwrite_frequency=2
    ),
    "scaled": lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1)),
}


def dense(factor=1.0):
    return tf.constant(GRADIENT) * factor


def sparse(factor=1.0):
    rows = tf.constant(GRADIENT[[1, 0, 1]]) * factor
    return tf.IndexedSlices(rows, tf.constant([1, 0, 1]), tf.constant([2, 2]))


def apply_in_the_scope(strategy, optimizer, variables, gradient):
    with strategy.scope():
        apply_outside(strategy, optimizer, variables, gradient)


def apply_outside(strategy, optimizer, variables, gradient):
    for factor in FACTORS:
        optimizer.apply([gradient(factor) for _ in variables], variables)


def apply_in_a_tf_function(strategy, optimizer, variables, gradient):
    optimizer.build(variables)

    @tf.function
    def step(factor):
        optimizer.apply([gradient(factor) for _ in variables], variables)

    for factor in FACTORS:
        step(tf.constant(factor))


def apply_in_run(strategy, optimizer, variables, gradient, decorator=None):
    def step(factor):
        # The replicas' gradients are added up.
        gradients = [gradient(factor / 2) for _ in variables]
        optimizer.apply(gradients, variables)

    def run(factor):
        strategy.run(step, args=(factor,))

    for factor in FACTORS:
        (decorator or (lambda fn: fn))(run)(tf.constant(factor))


def apply_in_a_function(strategy, optimizer, variables, gradient):
    apply_in_run(strategy, optimizer, variables, gradient, keras_dist.function)


def apply_in_fit(strategy, optimizer, variables, gradient):
    class Model(keras.Model):
        def train_step(self, data):
            x, _ = data
            with tf.GradientTape() as tape:
                total = sum(tf.reduce_sum(dense() * v) for v in variables)
                loss = tf.reduce_mean(x) * total
            optimizer.apply(tape.gradient(loss, variables), variables)
            return {"loss": loss}

    with strategy.scope():
        model = Model()
        model.compile(optimizer)
    for factor in FACTORS:
        x = np.full((4, 1), factor, "float32")
        model.fit(x, x, batch_size=4, verbose=0)


OUTSIDE = [apply_in_the_scope, apply_outside]
REPLICAS = [apply_in_run, apply_in_a_function, apply_in_fit]
# Variables of the strategy, of TensorFlow, of both, and of plain Keras too.
AMONG = ["own", "native", "both", "outer"]
CASES = [
    *itertools.product(OPTIMIZERS, OUTSIDE, [dense, sparse], AMONG),
    *itertools.product(["sgd", "adam"], REPLICAS, [dense], AMONG[:3]),
    ("sgd", apply_in_a_tf_function, dense, "own"),
]
# Plain Keras takes native variables with some settings only.
NATIVE = ("sgd", "momentum", "adam")
CASES = [c for c in CASES if c[0] in NATIVE or c[3] in ("own", "outer")]


@functools.cache
def expected(name, gradient, kind, count):
    """What plain Keras makes of so many variables."""
    variables = [kind(VALUE) for _ in range(count)]
    apply_outside(None, OPTIMIZERS[name](), variables, gradient)
    return np.asarray(tf.convert_to_tensor(variables[0]))


def assert_applied(name, gradient, variables):
    kind = tf.Variable if name in NATIVE else keras.Variable
    for variable in variables:
        np.testing.assert_allclose(
            np.asarray(tf.convert_to_tensor(variable)),
            expected(name, gradient, kind, len(variables)),
            rtol=1e-6,
        )


@pytest.mark.parametrize("make", [strategy_of, central])
@pytest.mark.parametrize(("name", "way", "gradient", "among"), CASES)
def test_apply(make, name, way, gradient, among):
    strategy, variables = make(2), []
    if among == "outer":
        variables.append(keras.Variable(VALUE))
    if among in ("native", "both"):
        variables.append(tf.Variable(VALUE))
    with strategy.scope():
        if among != "native":
            variables.append(keras.Variable(VALUE))
        if among == "both":
            variables.append(tf.Variable(VALUE))
        optimizer = OPTIMIZERS[name]()
    way(strategy, optimizer, variables, gradient)
    assert_applied(name, gradient, variables)


@pytest.mark.parametrize("built", ["not yet", "in the scope", "outside"])
@pytest.mark.parametrize("way", [apply_in_run, apply_in_the_scope])
def test_an_optimizer_from_outside(built, way):
    strategy, variables = strategy_of(2), [tf.Variable(VALUE)]
    optimizer = OPTIMIZERS["adam"]()
    if built == "outside":
        optimizer.build(variables)
    if built == "in the scope":
        with strategy.scope():
            optimizer.build(variables)
    way(strategy, optimizer, variables, dense)
    assert_applied("adam", dense, variables)


def test_after_the_session_was_cleared_in_the_scope():
    with strategy_of(2).scope():
        keras.utils.clear_session()
        variables = [keras.Variable(VALUE), tf.Variable(VALUE)]
        apply_outside(None, OPTIMIZERS["adam"](), variables, dense)
    assert_applied("adam", dense, variables)


class Noting(optimizers.SGD):
    """Notes of what kind the updates of tables are."""

    def __init__(self):
        super().__init__(0.1)
        self.kinds = set()

    def assign_sub(self, variable, value):
        self.kinds.add(type(value))
        super().assign_sub(variable, value)


@pytest.mark.parametrize("make", [strategy_of, central])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_sparse_gradients_stay_sparse(make, is_scaled):
    with make(2).scope():
        optimizer = noting = Noting()
        if is_scaled:
            optimizer = optimizers.LossScaleOptimizer(noting)
        model = keras.Sequential([keras.layers.Embedding(9, 1)])
        model.build((None, 2))
        model.compile(optimizer, "mse")
        model.fit(np.ones((4, 2)), np.ones((4, 2, 1)), verbose=0)
        optimizer.apply([sparse()], model.trainable_variables)
    assert noting.kinds == {tf.IndexedSlices}


@pytest.mark.parametrize("make", [strategy_of, central])
def test_an_optimizer_of_other_variables(make):
    x = np.ones((4, 2), "float32")
    with make(2).scope():
        optimizer = optimizers.Adam()
        for expected in (None, "Unknown variable: "):
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile(optimizer, "mse")
            if expected is None:
                model.fit(x, x[:, :1], verbose=0)
                continue
            with pytest.raises(ValueError, match=expected):
                model.fit(x, x[:, :1], verbose=0)


CONVERSIONS = [int, float, complex]


@pytest.mark.parametrize("value", [3, 2.5, True, 0])
@pytest.mark.parametrize("convert", CONVERSIONS)
def test_a_number(convert, value):
    plain = keras.Variable(value, trainable=False)
    with strategy_of(2).scope():
        ours = keras.Variable(value, trainable=False)
    assert convert(ours.value) == convert(plain.value)
    if convert in (int, float):  # else as plain Keras, which has none
        assert convert(ours) == convert(plain)


def test_what_is_no_number():
    with strategy_of(2).scope():
        vector = keras.Variable([1.0, 2.0])
    with pytest.raises(TypeError, match="size-1|only length-1|scalar"):
        float(vector.value)


def test_a_counter_that_a_callback_reads():
    class Counter(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.counter = self.add_weight(
                shape=(), dtype="int32", trainable=False
            )

        def call(self, x):
            self.counter.assign_add(1)
            return x

    with strategy_of(2).scope():
        layer = Counter()
        model = keras.Sequential([layer, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    seen = []
    callback = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(int(layer.counter.value))
    )
    x = np.ones((4, 2), "float32")
    model.fit(x, x[:, :1], epochs=3, callbacks=[callback], verbose=0)
    assert seen == [1, 2, 3]


def test_an_adopted_model_is_exported(tmp_path):
    """TensorFlow saves no dict that was changed behind its back."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("adam", "mse")
    x, y = np.ones((8, 4), "float32"), np.ones((8, 3), "float32")
    model.fit(x, y, verbose=0)
    strategy_of(2).distribute(model)
    model.fit(x, y, verbose=0)
    model.export(tmp_path / "exported", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "exported")
    expected = model.predict(x, verbose=0)
    np.testing.assert_allclose(loaded.serve(x), expected, rtol=1e-5)

"""Compiled functions work with TensorFlow's functions, tapes and values."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dist
from functions.helpers import array
from functions.helpers import ids
from functions.helpers import numbers
from functions.helpers import strategy_of
from parity.harness import central


@pytest.mark.parametrize(("make", "count"), [(strategy_of, 2), (central, 1)])
def test_xla_is_for_one_device(make, count):
    @keras_dist.function(jit_compile=True)
    def double(x):
        return 2 * x

    assert float(double(np.float32(3.0))) == 6.0
    strategy = make(count)
    with pytest.warns(UserWarning, match="(?s)XLA compilation is off.*double"):
        found = numbers(strategy.run(double, (ids(strategy),)))
    assert found == [0.0, 2.0][:count]
    strategy.run(double, (ids(strategy),))


def test_a_part_of_a_function_of_tensorflow():
    strategy = strategy_of(2)
    traces = []

    @keras_dist.function
    def step(x):
        traces.append(1)
        return x + 1

    @tf.function
    def outer(x):
        return strategy.run(step, (x,)), step(tf.constant(1.0))

    keras_dist.get_strategy().run(step, (tf.constant(1.0),))  # seeds are made
    traces.clear()
    for _ in range(2):
        mirrored, plain = outer(ids(strategy))
        assert numbers(mirrored) == [1.0, 2.0]
        assert float(plain) == 2.0
    assert len(traces) == 3


def test_tapes_of_tensorflow_see_through_it():
    strategy = strategy_of(2)
    with strategy.scope():
        v = keras.Variable(3.0)
    square = keras_dist.function(lambda x: v * v * x)

    def step(x):
        with tf.GradientTape() as tape:
            y = square(x)
        return tape.gradient(y, v.value)

    assert numbers(strategy.run(step, (ids(strategy),))) == [0.0, 6.0]
    x = tf.constant(2.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = keras_dist.function(lambda x: x * x)(x)
    assert float(tape.gradient(y, x)) == 4.0


def test_variables_that_moved_to_a_strategy_are_found_again():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    kernel = model.layers[0].kernel

    @keras_dist.function
    def read():
        return kernel + 0.0

    read()
    strategy_of(2).distribute(model)
    kernel.assign(tf.ones((2, 1)))
    assert array(read()).tolist() == [[1.0], [1.0]]


def test_only_functions_whose_variables_moved_are_traced_anew():
    traces = []

    def doubled(variable):
        @keras_dist.function
        def fn():
            traces.append(variable.name)
            return 2 * variable.value

        return fn

    stays, moves = keras.Variable(1.0, name="a"), keras.Variable(2.0, name="b")
    functions = [doubled(stays), doubled(moves)]
    for fn in functions:
        fn()
    before = list(traces)
    layer = keras.layers.Dense(1)
    model = keras.Sequential([keras.layers.Input((2,)), layer])
    model.extra = moves
    keras_dist.MirroredStrategy(["cpu:0", "cpu:1"]).distribute(model)
    moves.assign(5.0)
    assert [float(fn()) for fn in functions] == [2.0, 10.0]
    assert traces == [*before, "b"]


def test_a_variable_is_an_argument_by_itself():
    one, other = keras.Variable(1.0), keras.Variable(10.0)

    @keras_dist.function
    def add(variable, x):
        variable.assign_add(x)
        return variable + 0.0

    seen = [float(add(v, np.float32(1.0))) for v in (one, other, one)]
    assert seen == [2.0, 11.0, 3.0]
    assert (float(one), float(other)) == (3.0, 11.0)


def test_sparse_and_ragged_values_pass():
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])

    @keras_dist.function
    def step(x):
        return x * 2.0, tf.IndexedSlices(tf.ones((1, 2)), tf.constant([3]))

    doubled, slices = step(ragged)
    assert doubled.to_list() == [[2.0], [4.0, 6.0]]
    assert slices.indices.numpy().tolist() == [3]


def test_a_tensor_that_left_its_trace_says_so():
    leaked = []

    @keras_dist.function
    def step(x):
        leaked.append(x * 2)
        return x

    step(np.float32(1.0))
    with pytest.raises(TypeError, match="out of scope"):
        float(leaked[0] + 1)

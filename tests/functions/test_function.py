"""Compiled functions give the numbers of functions that are not compiled."""

import keras
import numpy as np
import pytest

import keras_dist
from functions.helpers import BACKEND
from functions.helpers import TRACES
from functions.helpers import X
from functions.helpers import array
from functions.helpers import assert_same
from functions.helpers import batches
from functions.helpers import cut
from functions.helpers import ids
from functions.helpers import numbers
from functions.helpers import replicas
from functions.helpers import strategy_of

ops = keras.ops


def test_normalization_of_each_replicas_own_rows_keeps_their_mean():
    strategy = strategy_of(2)
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.5)
        layer.build((None, 1))
    x = cut(np.array([[1.0], [3.0], [5.0], [9.0]], "float32"), 2)

    @keras_dist.function
    def step(x):
        return layer(x, training=True)

    for mean in (2.25, 3.375):
        strategy.run(step, (x,))
        np.testing.assert_allclose(array(layer.moving_mean), [mean])


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_dropout_differs_by_replica_and_by_call(num_replicas):
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        layer = keras.layers.Dropout(0.5, seed=3)
    step = keras_dist.function(lambda x: layer(x, training=True))
    x = cut(np.ones((32 * num_replicas, 2), "float32"), num_replicas)
    drawn = [numbers(strategy.run(step, (x,))) for _ in range(2)]
    seen = [part for parts in drawn for part in parts]
    assert all(seen[i] != seen[j] for i in range(len(seen)) for j in range(i))


def test_random_numbers_are_those_of_the_uncompiled_function():
    def drawn(compiles):
        keras.utils.set_random_seed(5)
        strategy = strategy_of(2)
        with strategy.scope():
            seeds = keras.random.SeedGenerator(4)

        def step(x):
            return keras.random.normal((2,), seed=seeds) + x

        if compiles:
            step = keras_dist.function(step)
        return [numbers(strategy.run(step, (ids(strategy),))) for _ in "ab"]

    assert_same(drawn(True), drawn(False))


def test_without_a_strategy_it_is_a_function_of_one_device():
    counter = keras.Variable(0, trainable=False)

    @keras_dist.function
    def count(x, *, times=2):
        """What it does."""
        counter.assign_add(1)
        return {"x": times * x, "none": None, "name": "n"}

    result = count(np.ones(2, "float32"))
    assert array(result["x"]).tolist() == [2.0, 2.0]
    assert (result["none"], result["name"]) == (None, "n")
    assert array(count(np.ones(2, "float32"), times=3)["x"])[0] == 3.0
    assert int(array(counter)) == 2
    assert (count.__name__, count.__doc__) == ("count", "What it does.")


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_arguments_are_traced_or_static_and_nested(num_replicas):
    strategy = strategy_of(num_replicas)
    traces = []

    @keras_dist.function
    def step(batch, scale, *, mode):
        traces.append(mode)
        (x, y), z = batch["pair"], batch["z"]
        sign = 1.0 if mode == "plus" else -1.0
        return {"out": (sign * scale * (x + y + z), None)}

    def run(first, scale, mode):
        x = cut(np.array([first, 2.0, 3.0, 4.0], "float32"), num_replicas)
        one = np.float32(1.0)
        batch = {"pair": (x, ops.ones(4 // num_replicas)), "z": one}
        result = strategy.run(step, [batch, scale], {"mode": mode})["out"]
        assert result[1] is None
        return np.concatenate(numbers(result[0])).tolist()

    assert run(1.0, 2, "plus") == [6.0, 8.0, 10.0, 12.0]
    before = len(traces)
    assert run(5.0, 2, "plus") == [14.0, 8.0, 10.0, 12.0]
    assert not TRACES or len(traces) == before
    assert run(1.0, 3, "minus") == [-9.0, -12.0, -15.0, -18.0]
    assert len(traces) > before


def test_results_of_python_and_values_of_the_closure():
    strategy = strategy_of(2)
    offset = 3.0
    shared = object()

    @keras_dist.function
    def step(x):
        return x + offset, "text", None, [1, {"a": shared}]

    for _ in range(2):
        x, text, none, (one, nested) = strategy.run(step, (ids(strategy),))
        assert numbers(x) == [3.0, 4.0]
        assert (text, none, int(array(one))) == ("text", None, 1)
        assert nested["a"] is shared


def test_two_functions_share_variables_with_assignments_from_outside():
    strategy = strategy_of(2)
    with strategy.scope():
        v = keras.Variable(1.0, aggregation="mean")
    add = keras_dist.function(lambda x: v.assign_add(x))
    double = keras_dist.function(lambda: v.assign(v * 2))
    strategy.run(add, (ids(strategy),))
    strategy.run(double)
    assert float(array(v)) == 3.0
    v.assign(10.0)
    strategy.run(add, (ids(strategy),))
    assert float(array(v)) == 10.5
    v.assign_add(1.5)
    strategy.run(double)
    assert float(array(v)) == 24.0


def test_one_function_under_two_strategies():
    strategies = [strategy_of(2), strategy_of(3), strategy_of(1)]

    @keras_dist.function
    def step(x):
        return keras_dist.get_replica_context().all_reduce("SUM", x + 1)

    for _ in range(2):
        for strategy, expected in zip(strategies, (3.0, 6.0, 1.0), strict=True):
            seen = numbers(strategy.run(step, (ids(strategy),)))
            assert seen == [expected] * strategy.num_replicas_in_sync


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_value_that_was_read_before_a_step_is_still_there(num_replicas):
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        v = keras.Variable([1.0, 2.0])
    add = keras_dist.function(lambda: v.assign_add(ops.ones(2)))
    strategy.run(add)
    before = v.value
    strategy.run(add)
    strategy.run(add)
    assert array(v).tolist() == [4.0, 5.0]
    # Where it is no array but the variable of the framework, it follows.
    expected = [2.0, 3.0] if BACKEND == "jax" else [4.0, 5.0]
    assert array(before).tolist() == expected


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_function_that_a_replica_function_calls(num_replicas):
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        v = keras.Variable(1.0, aggregation="sum")

    @keras_dist.function
    def inner(x):
        v.assign_add(x)
        return (
            v.value * 2,
            keras_dist.get_replica_context().num_replicas_in_sync,
        )

    def outer(x):
        doubled, count = inner(x + 1)
        return doubled + x, count

    total = sum(range(1, num_replicas + 1))
    for calls in (1, 2):
        seen, count = strategy.run(outer, (ids(strategy),))
        value = float(array(v))
        assert num_replicas > 1 or value == 1.0 + calls * total
        assert numbers(seen) == [2 * value + i for i in range(num_replicas)]
        assert int(array(count)) == num_replicas


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_run_and_reduce_in_a_function(num_replicas):
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        v = keras.Variable(0.0, aggregation="mean")
    traces = []

    @keras_dist.function
    def step(x):
        traces.append(1)

        def replica_fn(x):
            v.assign_add(ops.sum(x))
            return ops.sum(x)

        sums = strategy.run(replica_fn, args=(x,))
        return strategy.reduce("SUM", sums, axis=None) + 1.0

    seen = [float(array(step(x))) for x in batches(strategy, X, size=11)]
    np.testing.assert_allclose(
        seen, [X[:11].sum() + 1, X[11:].sum() + 1], rtol=1e-5
    )
    np.testing.assert_allclose(
        array(v), X.sum() / num_replicas, rtol=1e-4, atol=1e-5
    )
    step(next(iter(batches(strategy, X, size=10))))
    before = len(traces)
    step(next(iter(batches(strategy, X, size=10))))
    assert not TRACES or len(traces) == before


def test_a_function_in_a_function_is_a_part_of_it():
    v = keras.Variable(1.0)

    @keras_dist.function
    def inner(x, scale):
        v.assign_add(x)
        return scale * v.value

    @keras_dist.function
    def outer(x):
        return inner(x, 2.0) + inner(x, 3.0)

    x = np.float32(1.0)
    assert [float(array(outer(x))) for _ in range(2)] == [13.0, 23.0]
    assert float(array(inner(x, 1.0))) == 6.0


def test_gradients_flow_through_a_function_in_a_replica_function():
    strategy = strategy_of(2)
    with strategy.scope():
        v = keras.Variable(3.0)
    square = keras_dist.function(lambda x: v * v * x)

    def step(x):
        return keras_dist.gradient(lambda: square(x), v)

    assert numbers(strategy.run(step, (ids(strategy),))) == [0.0, 6.0]


def test_methods_of_equal_objects_are_two_functions():
    class Adder:
        def __init__(self):
            self.v = keras.Variable(0.0)

        def __eq__(self, other):
            return isinstance(other, Adder)

        def __hash__(self):
            return 1

        @keras_dist.function
        def step(self):
            self.v.assign_add(1.0)

    one, two = Adder(), Adder()
    one.step()
    two.step()
    assert (float(array(one.v)), float(array(two.v))) == (1.0, 1.0)


def test_a_first_call_that_failed_is_forgotten():
    strategy = strategy_of(2)
    with strategy.scope():
        layer = keras.layers.Dense(1)

    @keras_dist.function
    def step(x, y):
        return layer(x) + y

    x = cut(np.ones((4, 3), "float32"), 2)
    with pytest.raises(TypeError):
        strategy.run(step, (x,))
    strategy.run(step, (x, 1.0))
    assert layer.built


def test_a_variable_as_an_argument():
    add = keras_dist.function(lambda v, x: v.assign_add(x))
    one, two = keras.Variable(0.0), keras.Variable(10.0)
    for _ in range(2):
        add(one, np.float32(1.0))
    add(two, np.float32(1.0))
    assert (float(array(one)), float(array(two))) == (2.0, 11.0)


@replicas
def test_values_of_the_closure_and_made_inside(num_replicas):
    strategy = strategy_of(num_replicas)
    outside = ids(strategy)

    @keras_dist.function
    def outer():
        inside = ids(strategy)
        result = strategy.run(lambda x, y: 2 * x + y, (outside, inside))
        own = strategy.experimental_local_results(result)
        return result, outside, inside, own

    with strategy.scope():
        for _ in range(2):
            result, same, made, own = outer()
    each = [float(i) for i in range(num_replicas)]
    assert numbers(same) == numbers(made) == each
    assert numbers(result) == [3 * number for number in each]
    assert [float(array(x)) for x in own] == numbers(result)

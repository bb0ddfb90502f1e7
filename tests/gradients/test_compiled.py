"""Compiled functions are differentiated by what they read."""

import contextlib
import functools
import inspect

import keras
import numpy as np
import pytest
from keras import ops

import keras_dist
from gradients.helpers import BACKEND
from gradients.helpers import array
from gradients.helpers import cut
from gradients.helpers import local
from gradients.helpers import strategy_of

# 0: outside of any scope.
everywhere = pytest.mark.parametrize("num_replicas", [0, 1, 2, 3])


class Setting:
    """A place to differentiate in: no strategy, or one of some replicas."""

    def __init__(self, num_replicas):
        self.count = max(num_replicas, 1)
        self.strategy = strategy_of(num_replicas) if num_replicas else None

    def scope(self):
        if self.strategy is None:
            return contextlib.nullcontext()
        return self.strategy.scope()

    def run(self, fn, *args):
        """What `fn` gives on each replica, as numbers."""
        if self.strategy is None:
            return local(fn(*args))
        return local(self.strategy.run(fn, args=args))


def in_each(test):
    """A test of a `Setting`, in the scope of each of them."""

    @functools.wraps(test)
    def tested(num_replicas, **kwargs):
        setting = Setting(num_replicas)
        with setting.scope():
            test(setting, **kwargs)

    own = inspect.signature(test).parameters["setting"]
    others = list(inspect.signature(test).parameters.values())[1:]
    tested.__signature__ = inspect.Signature(
        [own.replace(name="num_replicas"), *others]
    )
    return everywhere(tested)


def variable():
    """A variable of value 3."""
    return keras.Variable(3.0, name="v")


@in_each
def test_without_arguments(setting):
    v = variable()
    square = keras_dist.function(lambda: v * v)
    found = setting.run(lambda: keras_dist.gradient(square, v))
    assert found == [6.0] * setting.count
    # Not what was compiled for something else before.
    assert setting.run(square) == [9.0] * setting.count
    v.assign(5.0)
    assert setting.run(lambda: keras_dist.gradient(square, v))[0] == 10.0
    assert float(keras_dist.gradient(square, v)) == 10.0


@in_each
@pytest.mark.parametrize("x", [2.0, np.float32(2.0), "tensor"])
def test_with_arguments(setting, x):
    v = variable()
    scaled = keras_dist.function(lambda x: v * v * x)
    given = ops.convert_to_tensor(2.0) if x == "tensor" else x
    value, found = keras_dist.value_and_grad(lambda: scaled(given), v)
    assert (float(value), float(found)) == (18.0, 12.0)
    found = setting.run(lambda: keras_dist.gradient(lambda: scaled(given), v))
    assert found == [12.0] * setting.count


@in_each
def test_second_derivatives(setting):
    v = variable()
    cube = keras_dist.function(lambda: v * v * v)
    slope = keras_dist.function(lambda: keras_dist.gradient(cube, v))
    for inner in (slope, lambda: keras_dist.gradient(cube, v)):
        outer = keras_dist.gradient(inner, v)
        assert float(outer) == 18.0
        found = setting.run(lambda fn=inner: keras_dist.gradient(fn, v))
        assert found == [18.0] * setting.count
    assert setting.run(slope) == [27.0] * setting.count


@in_each
def test_what_is_written_is_kept_once(setting):
    v, metric = variable(), keras.metrics.Mean()
    steps = keras.Variable(0.0, trainable=False, name="steps")

    @keras_dist.function
    def loss():
        steps.assign_add(1.0)
        metric.update_state(v)
        return v * v

    for _ in range(2):
        found = setting.run(lambda: keras_dist.gradient(loss, v))
        assert found == [6.0] * setting.count
    assert float(array(steps)) == 2.0
    assert float(array(metric.result())) == 3.0


@in_each
def test_batch_normalization(setting):
    layer = keras.layers.BatchNormalization(momentum=0.5)
    layer.build((None, 2))
    x = ops.convert_to_tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 9.0]])
    weights = layer.trainable_variables

    def loss():
        return ops.sum(ops.square(layer(x, training=True)) * x)

    compiled = keras_dist.function(loss)
    before = [array(each) for each in layer.variables]
    expected = [array(g) for g in keras_dist.gradient(loss, weights)]
    moved = [array(each) for each in layer.variables]
    for each, value in zip(layer.variables, before, strict=True):
        each.assign(value)
    found = keras_dist.gradient(compiled, weights)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(array(ours), theirs, rtol=1e-5)
    for each, value in zip(layer.variables, moved, strict=True):
        np.testing.assert_allclose(array(each), value, rtol=1e-5)


@in_each
def test_branches(setting):
    v = variable()
    steps = keras.Variable(0.0, trainable=False, name="steps")
    square = keras_dist.function(lambda: v * v)

    def counted():
        steps.assign_add(1.0)
        return square()

    def loss(predicate):
        return ops.cond(predicate, counted, lambda: v * 1.0)

    for predicate, expected in ((True, 6.0), (False, 1.0)):
        given = ops.convert_to_tensor(predicate)
        found = setting.run(
            lambda given=given: keras_dist.gradient(lambda: loss(given), v)
        )
        assert found == [expected] * setting.count
    assert float(array(steps)) == 1.0


@in_each
def test_a_gradient_of_the_users_own(setting):
    v = variable()
    square = keras_dist.function(lambda: v * v)

    @ops.custom_gradient
    def same(x):
        def grad(*args, upstream=None):
            return 7.0 * (args[0] if upstream is None else upstream)

        return x * 1.0, grad

    found = setting.run(lambda: keras_dist.gradient(lambda: same(square()), v))
    assert found == [42.0] * setting.count


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_uneven_rows(num_replicas):
    strategy = strategy_of(num_replicas)
    rows = np.arange(1.0, 8.0, dtype="float32")
    with strategy.scope():
        v = variable()

        @keras_dist.function
        def loss(x):
            return v * v * ops.sum(x)

        found = strategy.run(
            lambda x: keras_dist.gradient(lambda: loss(x), v),
            args=(cut(rows, num_replicas),),
        )
    total = strategy.reduce("SUM", found, axis=None)
    assert float(array(total)) == 6.0 * rows.sum()


@in_each
def test_values_of_a_stateless_scope(setting):
    v = variable()
    square = keras_dist.function(lambda: v * v)

    def squared(value):
        with keras.StatelessScope([(v, ops.convert_to_tensor(value))]):
            return square()

    assert [float(squared(x)) for x in (1.0, 2.0, 5.0)] == [1.0, 4.0, 25.0]
    assert setting.run(lambda: squared(4.0)) == [16.0] * setting.count
    assert setting.run(square) == [9.0] * setting.count


class Penalized(keras.layers.Layer):
    """A layer that asks a compiled function without arguments."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")
        self.squared = keras_dist.function(lambda: self.scale * self.scale)

    def call(self, x):
        return x * self.squared()


@everywhere
def test_a_layer_in_fit(num_replicas):
    x = np.arange(1.0, 12.0, dtype="float32")[:, None]
    with Setting(num_replicas).scope():
        model = keras.Sequential([Penalized()])
        model.compile(keras.optimizers.SGD(0.0005), "mse")
    model.fit(x, 3.0 * x, batch_size=4, epochs=2, verbose=0, shuffle=False)
    scale = 1.0
    for rows in (x[:4], x[4:8], x[8:]) * 2:
        error = (scale**2 - 3.0) * rows
        scale -= 0.0005 * np.mean(2.0 * error * rows) * 2.0 * scale
    found = float(array(model.layers[0].scale))
    assert found == pytest.approx(scale, rel=1e-4)


@in_each
def test_a_layer_that_is_computed_again(setting):
    with keras.RematScope(mode="full"):
        layer = Penalized()
    x = np.ones((2, 2), "float32")
    layer.build(x.shape)
    layer.scale.assign(3.0)
    found = setting.run(
        lambda: keras_dist.gradient(lambda: ops.sum(layer(x)), layer.scale)
    )
    assert found == [24.0] * setting.count


@pytest.mark.parametrize("compiles", [False, True])
def test_run_in_what_is_differentiated(compiles):
    """One replica's gradients are right; of several there would be none."""
    for count in (1, 2):
        strategy = strategy_of(count)
        with strategy.scope():
            v = variable()
            square = lambda: v * v  # noqa: B023, E731
            fn = keras_dist.function(square) if compiles else square

            def loss(strategy=strategy, fn=fn):
                return strategy.reduce("SUM", strategy.run(fn), axis=None)

            if count == 1:
                assert float(keras_dist.gradient(loss, v)) == 6.0
                continue
            for outer in (
                lambda v=v, loss=loss: keras_dist.gradient(loss, v),
                keras_dist.function(
                    lambda v=v, loss=loss: keras_dist.gradient(loss, v)
                ),
            ):
                with pytest.raises(
                    keras_dist.errors.UnsupportedModelError,
                    match="called in a function that is being differentiated",
                ):
                    outer()
            assert float(array(v)) == 3.0


def test_scan_in_what_is_differentiated():
    batches = [np.float32(x) for x in (1.0, 2.0)]
    for count in (1, 2):
        strategy = strategy_of(count)
        with strategy.scope():
            v = variable()
            step = keras_dist.function(lambda x: v * v * x)  # noqa: B023

            def loss(step=step):
                return ops.sum(
                    keras_dist.scan_steps(step, iter(batches), steps=2)
                )

            if count == 1:
                assert float(keras_dist.gradient(loss, v)) == 18.0
            else:
                with pytest.raises(
                    keras_dist.errors.UnsupportedModelError,
                    match="being differentiated",
                ):
                    keras_dist.gradient(loss, v)


def test_run_in_a_stateless_scope():
    strategy = strategy_of(2)
    with strategy.scope():
        v = variable()
        for fn in (lambda: v * v, keras_dist.function(lambda: v * v)):
            with (
                keras.StatelessScope([(v, ops.convert_to_tensor(1.0))]),
                pytest.raises(
                    keras_dist.errors.UnsupportedModelError,
                    match="called in a `keras.StatelessScope`",
                ),
            ):
                strategy.run(fn)


@pytest.mark.skipif(BACKEND != "jax", reason="transformations of JAX")
@in_each
def test_transformations_of_jax(setting):
    import jax

    v = variable()
    square = keras_dist.function(lambda: v * v)
    for transformed in (
        lambda: jax.jit(lambda: square())(),
        jax.checkpoint(lambda: square()),
        lambda: jax.vmap(lambda x: x * square())(jax.numpy.ones(2)).sum() / 2,
    ):
        found = setting.run(lambda fn=transformed: keras_dist.gradient(fn, v))
        assert found == [6.0] * setting.count

    def of_value(value):
        with keras.StatelessScope([(v, value)]):
            return square()

    assert setting.run(lambda: jax.grad(of_value)(3.0)) == [6.0] * setting.count


@pytest.mark.skipif(BACKEND != "jax", reason="transformations of JAX")
@in_each
def test_assignments_in_transformations_of_jax(setting):
    import jax

    v, steps = variable(), keras.Variable(1.0, trainable=False, name="steps")

    @jax.checkpoint
    def loss():
        steps.assign_add(v)
        return v * v

    with pytest.raises(keras_dist.errors.TraceError, match="'steps'"):
        setting.run(lambda: keras_dist.gradient(loss, v))
    assert float(array(steps)) == 1.0

"""What a differentiated function does beside its value is done, once."""

from contextlib import nullcontext

import keras
import numpy as np
import pytest
from keras import ops

import keras_dist
from gradients.helpers import BACKEND
from gradients.helpers import array
from gradients.helpers import local
from gradients.helpers import strategy_of

X = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 9.0]], "float32")


def test_assignments_count_once_and_are_seen_at_once():
    v = keras.Variable(2.0)
    count = keras.Variable(1.0, trainable=False)
    seen = []

    def fn():
        count.assign_add(1.0)
        count.assign_add(v)
        seen.append(count + 0.0)
        return v * 3.0

    (value, aux), _ = keras_dist.value_and_grad(
        lambda: (fn(), seen.pop()), [v], has_aux=True
    )
    assert float(value) == 6.0 and float(aux) == 4.0
    assert float(array(count)) == 4.0


def test_assignments_of_nested_functions_count_once():
    v, count = keras.Variable(2.0), keras.Variable(0.0, trainable=False)

    def slope():
        return keras_dist.gradient(lambda: (count.assign_add(v), v**3)[1], v)

    assert float(keras_dist.gradient(slope, v)) == 12.0
    assert float(array(count)) == 2.0


def test_a_metric_that_makes_its_state_late():
    model = keras.layers.Dense(3)
    model.build((None, 2))
    metric = keras.metrics.F1Score(average="micro")
    y = np.eye(3, dtype="float32")

    def fn():
        metric.update_state(y, ops.softmax(model(X)))
        return ops.sum(model(X))

    keras_dist.gradient(fn, model.trainable_variables)
    once = [array(v) for v in metric.variables]
    expected = keras.metrics.F1Score(average="micro")
    expected.update_state(y, ops.softmax(model(X)))
    assert len(once) == len(expected.variables) > 0
    for ours, theirs in zip(once, expected.variables, strict=True):
        np.testing.assert_allclose(ours, array(theirs), rtol=1e-6)


def test_a_layer_that_is_built_late():
    first, late = keras.Variable(2.0), keras.layers.Dense(1)
    grads = keras_dist.gradient(lambda: ops.sum(late(X)) * first, [first])
    kernel = array(late.kernel)
    np.testing.assert_allclose(
        float(grads[0]), float(np.sum(X @ kernel)), rtol=1e-5
    )
    grads = keras_dist.gradient(
        lambda: ops.sum(late(X)), late.trainable_variables
    )
    np.testing.assert_allclose(array(grads[0])[:, 0], X.sum(axis=0))


def test_seeds_move_on():
    layer = keras.layers.Dropout(0.5, seed=1)
    v = keras.Variable(np.ones((8, 8), "float32"))

    def fn():
        dropped = layer(v, training=True)
        return ops.sum(dropped), dropped

    (_, first), _ = keras_dist.value_and_grad(fn, [v], has_aux=True)
    (_, second), _ = keras_dist.value_and_grad(fn, [v], has_aux=True)
    assert not np.array_equal(array(first), array(second))
    again = keras.layers.Dropout(0.5, seed=1)
    np.testing.assert_allclose(array(first), array(again(v, training=True)))

    def draw():  # by the global seed
        noise = keras.random.normal((4,))
        return ops.sum(v) * ops.sum(noise), noise

    _, first = keras_dist.gradient(draw, [v], has_aux=True)
    _, second = keras_dist.gradient(draw, [v], has_aux=True)
    assert not np.array_equal(array(first), array(second))


def _regularized():
    class Penalized(keras.layers.Layer):
        def call(self, x):
            self.add_loss(ops.mean(x) * 0.1)
            return x

    inputs = keras.Input((2,))
    x = keras.layers.Dense(2, kernel_regularizer="l2")(inputs)
    return keras.Model(inputs, Penalized()(x))


def test_losses_of_layers_are_there_and_leave_nothing_behind():
    model = _regularized()
    kernel = array(model.layers[1].kernel)
    expected = 0.1 * np.mean(X @ kernel) + 0.01 * np.sum(kernel**2)
    for _ in range(2):
        value = keras_dist.value_and_grad(
            lambda: (model(X), sum(model.losses))[1],
            model.trainable_variables,
        )[0]
        np.testing.assert_allclose(float(value), expected, rtol=1e-5)
    for loss in model.losses:
        array(loss)

    def twice():
        model(X)
        model(X)
        assert len(model.losses) == 2  # those of the second call
        return sum(model.losses)

    keras_dist.gradient(twice, model.trainable_variables)


@pytest.mark.parametrize("scale", [2.0**4, 2.0**100])
def test_loss_scaling(scale):
    # Keras' own can't be applied in a loop on JAX.
    with keras_dist.OneDeviceStrategy("cpu:0").scope():
        v = keras.Variable(np.array([1.0, 2.0], "float32"))
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.5), initial_scale=scale
    )
    for _ in range(2):
        grads = keras_dist.gradient(
            lambda: optimizer.scale_loss(
                ops.sum(v * v) * (1.0 if scale < 100 else 2.0**40)
            ),
            [v],
        )
        optimizer.apply(grads, [v])
    if scale < 100:
        np.testing.assert_allclose(array(v), [0.0, 0.0], atol=1e-6)
        assert int(array(optimizer.step_counter)) == 2
    else:
        np.testing.assert_allclose(array(v), [1.0, 2.0])
        assert float(array(optimizer.dynamic_scale)) == scale / 4


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_loss_scaling_of_some_variables_in_another_order():
    with keras_dist.OneDeviceStrategy("cpu:0").scope():
        a, b, c = (keras.Variable(x, name="v") for x in (1.0, 2.0, 3.0))
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.5), initial_scale=4.0
    )
    optimizer.build([a, b, c])
    grads = keras_dist.gradient(
        lambda: optimizer.scale_loss(a * 1.0 + b * 2.0 + c * 3.0), [c, a]
    )
    optimizer.apply(grads, [c, a])
    assert [float(array(v)) for v in (a, b, c)] == [0.5, 2.0, 1.5]


@pytest.mark.skipif(
    BACKEND != "jax", reason="Only JAX has functions of arrays alone."
)
def test_inside_of_a_traced_function_and_a_users_scope():
    import jax

    v = keras.Variable(3.0)
    count = keras.Variable(0.0, trainable=False)

    @jax.jit
    def step(value, counted):
        scope = keras.StatelessScope([(v, value), (count, counted)])
        with scope:
            _, grad = keras_dist.value_and_grad(
                lambda: (count.assign_add(1.0), v * v)[1], v
            )
            v.assign_sub(grad)
        return [scope.get_current_value(each) for each in (v, count)]

    value, counted = step(3.0, 0.0)
    assert (float(value), float(counted)) == (-3.0, 1.0)
    assert (float(array(v)), float(array(count))) == (3.0, 0.0)


@pytest.mark.skipif(
    BACKEND != "tensorflow", reason="Only TensorFlow has `tf.function`."
)
def test_inside_of_a_tf_function():
    import tensorflow as tf

    v, metric = keras.Variable(3.0), keras.metrics.Mean()
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build([v])

    @tf.function
    def step(x):
        def fn():
            metric.update_state(v)
            if x > 1.0:
                return v * v
            return v * 0.0

        value, grads = keras_dist.value_and_grad(fn, [v])
        optimizer.apply(grads, [v])
        return value

    assert [float(step(tf.constant(x))) for x in (2.0, 2.0, 0.0)] == [9, 0, 0]
    assert float(metric.result()) == 1.0


ways = pytest.mark.parametrize("way", ["code", "function", "replicas"])


def differentiated(way, fn, variables):
    """Gradients of a function: of Python code, compiled, or on replicas."""
    if way == "code":
        return [array(g) for g in keras_dist.gradient(fn, variables)]
    step = keras_dist.function(lambda: keras_dist.gradient(fn, variables))
    if way == "function":
        return [array(g) for g in step()]
    return [local(g)[0] for g in keras_dist.get_strategy().run(step)]


def scope_of(way):
    return strategy_of(2).scope() if way == "replicas" else nullcontext()


@ways
def test_no_gradient_passes_through_an_assignment(way):
    with scope_of(way):
        v, kept = keras.Variable(2.0), keras.Variable(0.0, trainable=False)

        def fn():
            kept.assign(v * 3.0)
            return kept * v

        (grad,) = differentiated(way, fn, [v])
        assert float(array(kept)) == 6.0
    assert float(grad) == 6.0


trained = pytest.mark.parametrize("trainable", [True, False])


@ways
@trained
def test_what_is_read_after_an_assignment_has_a_gradient(way, trainable):
    with scope_of(way):
        v = keras.Variable(5.0, trainable=trainable)

        def fn():
            before = v * 1.0
            v.assign(v * 3.0)
            return v * v + before

        (grad,) = differentiated(way, fn, [v])
        assert float(array(v)) == 15.0
    assert float(grad) == 2 * 15.0 + 1.0


@ways
@trained
def test_what_is_read_between_assignments_has_a_gradient(way, trainable):
    with scope_of(way):
        v = keras.Variable(2.0, trainable=trainable)

        def fn():
            before = v * 1.0
            v.assign(v * 2.0)
            between = ops.square(v)
            v.assign(v * 2.0)
            return before + between + v * 100.0

        if BACKEND == "torch" and way != "replicas" and trainable:
            # A parameter is changed in place.
            with pytest.raises(RuntimeError, match="inplace operation"):
                differentiated(way, fn, [v])
            return
        (grad,) = differentiated(way, fn, [v])
        assert float(array(v)) == 8.0
    assert float(grad) == 1.0 + 2 * 4.0 + 100.0


@ways
def test_a_normalized_kernel_has_the_gradient_of_the_layer(way):
    with scope_of(way):
        layer = keras.layers.SpectralNormalization(keras.layers.Dense(3))
        layer.build((None, 2))
        (grad,) = differentiated(
            way,
            lambda: ops.sum(ops.square(layer(X, training=True))),
            [layer.layer.kernel],
        )
        kernel, bias = array(layer.layer.kernel), array(layer.layer.bias)
    expected = 2 * X.T @ (X @ kernel + bias)
    np.testing.assert_allclose(grad, expected, rtol=1e-5)


@pytest.mark.parametrize("num_replicas", [0, 1, 2])
@pytest.mark.parametrize("where", ["cond", "while_loop", "fori_loop", "scan"])
def test_assignments_in_control_flow_of_a_compiled_function(
    where, num_replicas
):
    strategy = strategy_of(num_replicas) if num_replicas else None
    with strategy.scope() if strategy else nullcontext():
        v = keras.Variable(2.0)
        count = keras.Variable(0.0, trainable=False)

        def once(x):
            count.assign_add(1.0)
            return x * v

        def repeated(x):
            if where == "cond":
                return ops.cond(x > 0.0, lambda: once(x), lambda: x)
            if where == "while_loop":
                return ops.while_loop(lambda x: x < 10.0, once, x)
            if where == "fori_loop":
                return ops.fori_loop(0, 3, lambda _, x: once(x), x)
            return ops.scan(lambda x, _: (once(x), x), x, length=3)[0]

        @keras_dist.function
        def step(x):
            repeated(x)
            if where == "while_loop" and BACKEND == "jax":
                return 0.0  # JAX can't differentiate it
            return keras_dist.gradient(lambda: repeated(x), v)

        x = ops.convert_to_tensor(np.float32(3.0))
        run = strategy.run if strategy else lambda fn, args: fn(*args)
        if BACKEND == "tensorflow" and num_replicas == 2:
            with pytest.raises(keras_dist.UnsupportedModelError, match="scan"):
                run(step, args=(x,))
            return
        grads = local(run(step, args=(x,)))
    # The derivatives of 3 v, 3 v**2 (which is enough for 10) and 3 v**3.
    times, expected = {"cond": (1, 3.0), "while_loop": (2, 12.0)}.get(
        where, (3, 36.0)
    )
    if where == "while_loop" and BACKEND == "jax":
        assert float(array(count)) == times
        return
    assert float(array(count)) == 2 * times
    assert [float(g) for g in grads] == [expected] * max(num_replicas, 1)

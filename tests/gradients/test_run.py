"""Gradients in replica functions train on several replicas as on one."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_dist
from gradients.helpers import array
from gradients.helpers import cut
from gradients.helpers import local
from gradients.helpers import strategy_of
from gradients.helpers import total

COUNTS = pytest.mark.parametrize("num_replicas", [1, 2, 3])


def _data(rows=7):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 4)).astype("float32")
    return x, rng.integers(0, 3, rows).astype("int32")


def _state(*things):
    return [array(v) for thing in things for v in thing.variables]


def assert_same(actual, expected, rtol=2e-5, atol=2e-6):
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)


@COUNTS
def test_each_replica_has_gradients_of_its_own(num_replicas):
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        v = keras.Variable(3.0)

    def replica_fn():
        index = keras_dist.get_replica_context().replica_id_in_sync_group
        return keras_dist.value_and_grad(lambda: v * v * (index + 1.0), [v])

    values, grads = strategy.run(replica_fn)
    expected = [9.0 * (i + 1) for i in range(num_replicas)]
    assert [float(x) for x in local(values)] == expected
    expected = [6.0 * (i + 1) for i in range(num_replicas)]
    assert [float(x) for x in local(grads[0])] == expected


def _model():
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(5, activation="tanh", kernel_regularizer="l2"),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dense(3),
        ]
    )


def _loop(num_replicas, scale=False):
    keras.utils.set_random_seed(1)
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        model = _model()
        optimizer = keras.optimizers.Adam(0.01)
        if scale:
            optimizer = keras.optimizers.LossScaleOptimizer(
                optimizer, initial_scale=8.0, dynamic_growth_steps=2
            )
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        f1 = keras.metrics.F1Score(average="macro")

    def replica_fn(x, y):
        def loss_fn():
            logits = model(x, training=True)
            accuracy.update_state(y, logits)
            f1.update_state(ops.one_hot(y, 3), ops.softmax(logits))
            loss = keras_dist.compute_average_loss(
                keras.losses.sparse_categorical_crossentropy(
                    y, logits, from_logits=True
                )
            ) + keras_dist.scale_regularization_loss(model.losses)
            return optimizer.scale_loss(loss), loss

        (_, loss), grads = keras_dist.value_and_grad(
            loss_fn, model.trainable_variables, has_aux=True
        )
        optimizer.apply(grads, model.trainable_variables)
        return loss

    args = tuple(cut(each, num_replicas) for each in _data())
    losses = [total(strategy, strategy.run(replica_fn, args)) for _ in range(3)]
    metrics = [array(accuracy.result()), array(f1.result())]
    return losses, metrics, _state(model, optimizer)


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("scale", [False, True])
def test_a_training_loop_is_that_of_one_device(num_replicas, scale):
    expected = _loop(1, scale=scale)
    losses, metrics, state = _loop(num_replicas, scale=scale)
    assert_same(losses, expected[0])
    assert_same(metrics, expected[1])
    assert_same(state, expected[2], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("aggregation", ["sum", "mean"])
@pytest.mark.parametrize("method", ["assign", "assign_add"])
def test_aggregated_assignments_are_seen_as_aggregated(aggregation, method):
    strategy = strategy_of(2)
    with strategy.scope():
        v = keras.Variable(3.0)
        shared = keras.Variable(1.0, trainable=False, aggregation=aggregation)

    def replica_fn():
        index = keras_dist.get_replica_context().replica_id_in_sync_group

        def fn():
            getattr(shared, method)(v * (index + 1.0))
            return v * 2.0, shared + 0.0

        grads, seen = keras_dist.gradient(fn, [v], has_aux=True)
        return grads[0], seen

    grads, seen = strategy.run(replica_fn)
    given = 9.0 if aggregation == "sum" else 4.5
    expected = given + (1.0 if method == "assign_add" else 0.0)
    assert [float(x) for x in local(grads)] == [2.0, 2.0]
    assert [float(x) for x in local(seen)] == [expected] * 2
    assert float(array(shared)) == expected


def test_a_replicas_own_sums_are_added_up():
    strategy = strategy_of(3)
    with strategy.scope():
        v = keras.Variable(2.0)
        counter = keras.Variable(
            0.0, aggregation="sum", synchronization="on_read"
        )

    def replica_fn():
        return keras_dist.gradient(
            lambda: (counter.assign_add(v), v * v)[1], [v]
        )

    strategy.run(replica_fn)
    assert float(array(counter)) == 6.0


@COUNTS
def test_a_layer_and_a_metric_that_are_made_late(num_replicas):
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        v = keras.Variable(1.0)
        layer = keras.layers.Dense(2, kernel_initializer="ones")
        metric = keras.metrics.F1Score(average="micro")

    def replica_fn(x):
        def fn():
            y = layer(x)
            metric.update_state(ops.ones_like(y), y)
            return ops.sum(y) * v

        return keras_dist.value_and_grad(fn, v)[1]

    x = np.arange(12.0, dtype="float32").reshape(3, 4)
    for _ in range(2):
        grad = strategy.run(replica_fn, (cut(x, num_replicas),))
    assert sum(float(g) for g in local(grad)) == 2 * x.sum()
    assert array(layer.kernel).tolist() == [[1.0, 1.0]] * 4
    assert float(array(metric.true_positives).sum()) == 12.0


def test_by_a_variable_that_is_not_trainable_and_by_inputs():
    strategy = strategy_of(2)
    with strategy.scope():
        v = keras.Variable(3.0, trainable=False)
        w = keras.Variable(2.0)

    def replica_fn(x):
        return keras_dist.gradient(lambda x: v * v * w * x, [v, w, x])

    grads = strategy.run(replica_fn, (keras_dist.PerReplica([1.0, 2.0]),))
    found = [[float(x) for x in local(g)] for g in grads]
    assert found == [[12.0, 24.0], [9.0, 18.0], [18.0, 18.0]]


@COUNTS
def test_outside_of_run_variables_of_a_strategy_have_gradients(num_replicas):
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        v = keras.Variable(3.0)
        count = keras.Variable(0.0, trainable=False)
        inside = keras_dist.gradient(lambda: v * v, [v])
    outside = keras_dist.gradient(lambda: (count.assign_add(v), v * v)[1], [v])
    assert [float(inside[0]), float(outside[0])] == [6.0, 6.0]
    assert float(array(count)) == 3.0


def test_a_failure_writes_nothing_and_closes_everything():
    strategy = strategy_of(2)
    with strategy.scope():
        v = keras.Variable(3.0)
        count = keras.Variable(0.0, trainable=False)

    def replica_fn():
        def fn():
            count.assign_add(1.0)
            raise KeyError("mine")

        return keras_dist.gradient(fn, [v])

    with pytest.raises(KeyError, match="mine"):
        strategy.run(replica_fn)
    assert float(array(count)) == 0.0
    grads = strategy.run(lambda: keras_dist.gradient(lambda: v * v, v))
    assert [float(g) for g in local(grads)] == [6.0, 6.0]

"""Replica functions and `tf.function` work around each other."""

import logging

import keras
import pytest
import tensorflow as tf

import keras_dist
from parity.harness import central
from parity.harness import strategy as mirrored


def context():
    return keras_dist.get_replica_context()


def test_numbers_of_python_leave_a_traced_run():
    strategy = mirrored(2)

    @tf.function
    def step():
        return strategy.run(lambda: context().replica_id_in_sync_group)

    assert isinstance(step(), keras_dist.PerReplica)
    assert [int(x) for x in step().values] == [0, 1]


@pytest.mark.parametrize("make", [mirrored, central])
@pytest.mark.parametrize("masked", [0, 1])
def test_numbers_of_rows_that_some_replicas_know(make, masked):
    strategy = make(2)
    parts = keras_dist.PerReplica([tf.ones((3, 2)), tf.zeros((1, 2))])

    def replica_fn(x):
        losses = tf.reduce_sum(x, axis=-1)
        if context().replica_id_in_sync_group == masked:
            losses = tf.boolean_mask(losses, losses > -1.0)
        return keras_dist.compute_average_loss(losses)

    @tf.function
    def step():
        return strategy.run(replica_fn, args=(parts,))

    assert [float(part) for part in step().values] == [1.5, 0.0]


@pytest.mark.parametrize("make", [mirrored, central])
def test_autograph_warns_of_nothing(make):
    strategy = make(2)
    with strategy.scope():
        variable = keras.Variable(1.0)
        optimizer = keras.optimizers.SGD(0.5)
        optimizer.build([variable])
    records, handler = [], logging.Handler()
    handler.emit = records.append

    @tf.function
    def step():
        gradient = tf.constant(0.5)
        strategy.run(lambda: optimizer.apply([gradient], [variable]))

    tf.get_logger().addHandler(handler)
    try:
        step()
    finally:
        tf.get_logger().removeHandler(handler)
    assert not [each.getMessage() for each in records]
    assert float(variable) == 0.5


def test_assignments_in_a_function_of_its_own_are_refused_by_name():
    strategy = mirrored(2)
    with strategy.scope():
        metric = keras.metrics.Sum(name="seen")

    @tf.function
    def part(x):
        metric.update_state(x)
        return x

    with pytest.raises(keras_dist.UnsupportedModelError, match="seen/total"):
        strategy.run(part, args=(tf.constant(1.0),))
    strategy.run(lambda: metric.update_state(1.0))
    assert float(metric.result()) == 2.0


@pytest.mark.parametrize("make", [mirrored, central])
def test_replicas_that_differ_are_named(make):
    strategy = make(3)

    def replica_fn():
        if context().replica_id_in_sync_group < 2:
            context().all_reduce("SUM", tf.constant(1.0))

    for run in (strategy.run, tf.function(strategy.run)):
        with pytest.raises(
            keras_dist.ReplicaDivergenceError, match="replica 2 at the end"
        ):
            run(replica_fn)
    assert strategy.run(lambda: 1.0) == 1.0

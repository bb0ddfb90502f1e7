"""After a replica function failed, nothing of it is left."""

import gc
import signal
import threading
import time

import keras
import numpy as np
import pytest

import keras_dist
from parity.harness import BACKEND
from parity.harness import strategy as mirrored
from parity.harness import to_numpy


class Failure(Exception):
    """Nothing else raises it."""


def replica_id():
    return keras_dist.get_replica_context().replica_id_in_sync_group


VARIABLES = {
    "moving statistics": {"trainable": False},
    "trained": {},
    "summed": {"aggregation": "sum", "synchronization": "on_read"},
}


@pytest.mark.parametrize("kind", VARIABLES)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_replica_that_fails_leaves_variables_as_they_were(kind, failing):
    strategy = mirrored(2)
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0], **VARIABLES[kind])
    before = [to_numpy(copy) for copy in variable.values]

    def replica_fn():
        variable.assign(variable + 5.0)
        if replica_id() == failing:
            raise Failure("on purpose")
        variable.assign(variable + 5.0)

    with pytest.raises(Failure, match="on purpose") as caught:
        strategy.run(replica_fn)
    assert any(f"replica {failing}" in n for n in caught.value.__notes__)
    for copy, value in zip(variable.values, before, strict=True):
        np.testing.assert_array_equal(to_numpy(copy), value)
    strategy.run(lambda: variable.assign(variable + 1.0))
    for copy, value in zip(variable.values, before, strict=True):
        np.testing.assert_array_equal(to_numpy(copy), value + 1.0)


def test_a_failure_names_the_line():
    strategy = mirrored(2)

    def replica_fn():
        raise Failure

    with pytest.raises(Failure) as caught:
        strategy.run(replica_fn)
    assert "replica_fn" in [entry.name for entry in caught.traceback]


def test_ctrl_c_in_a_replica():
    strategy = mirrored(3)

    def replica_fn():
        if replica_id() == 1:
            raise KeyboardInterrupt
        return replica_id()

    with pytest.raises(KeyboardInterrupt):
        strategy.run(replica_fn)
    assert not keras_dist.has_strategy()
    assert strategy.run(replica_id).values == (0, 1, 2)


def test_replicas_that_part_get_an_error_and_the_next_call_works():
    strategy = mirrored(3)

    def replica_fn():
        context = keras_dist.get_replica_context()
        if replica_id() != 1:
            context.all_reduce("SUM", 1.0)

    with pytest.raises(keras_dist.ReplicaDivergenceError, match="replica 1"):
        strategy.run(replica_fn)
    total = strategy.run(
        lambda: keras_dist.get_replica_context().all_reduce("SUM", 1.0)
    )
    assert [float(to_numpy(part)) for part in total.values] == [3.0] * 3


def test_a_failure_after_an_update_takes_back_what_came_after_it():
    strategy = mirrored(3)
    with strategy.scope():
        variable = keras.Variable(1.0)
        optimizer = keras.optimizers.SGD(1.0)

    def replica_fn():
        optimizer.apply([keras.ops.convert_to_tensor(1.0)], [variable])
        variable.assign(float(replica_id()))

    with pytest.raises(keras_dist.ReplicaDivergenceError):
        strategy.run(replica_fn)
    assert [float(copy) for copy in variable.values] == [-2.0] * 3
    strategy.run(lambda: variable.assign_add(1.0))
    assert [float(copy) for copy in variable.values] == [-1.0] * 3


def test_a_signal_in_a_replica_thread():
    """It reaches the caller while that waits, or just after."""
    strategy = mirrored(2)

    def replica_fn():
        if replica_id() == 1:
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.2)
        return replica_id()

    # A process in the background of a shell ignores it to begin with.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    # In a finalizer that the collector runs, Python drops what is raised.
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                strategy.run(replica_fn)
                time.sleep(1)
            assert strategy.run(replica_id).values == (0, 1)
    finally:
        gc.enable()
        signal.signal(signal.SIGINT, before)


def test_fit_in_a_replica_is_refused():
    strategy = mirrored(2)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((4, 2), "float32")
    with pytest.raises(RuntimeError, match="outside of `run`"):
        strategy.run(lambda: model.fit(x, x[:, :1], verbose=0))
    model.fit(x, x[:, :1], verbose=0)


def test_variables_of_another_strategy_are_refused():
    first, second = mirrored(2), mirrored(3)
    with first.scope():
        variable = keras.Variable(1.0, name="theirs")
    for fn in (lambda: variable + 1.0, lambda: variable.assign(2.0)):
        with pytest.raises(keras_dist.StrategyMismatchError, match="theirs"):
            second.run(fn)
    assert float(variable) == 1.0


@pytest.mark.parametrize(("made", "number"), [(2, 3), (3, 2)])
def test_values_of_another_number_of_replicas_are_refused(made, number):
    value = mirrored(made).run(lambda: replica_id() + 0.5)
    other = mirrored(number)
    for call in (
        lambda: other.run(lambda x: x, args=(value,)),
        lambda: other.reduce("SUM", value, axis=None),
        lambda: other.gather(value, axis=0),
    ):
        told = f"{made} components(.|\n)*Expected: {number}"
        with pytest.raises(ValueError, match=told):
            call()


def _live():
    """How many arrays are alive."""
    gc.collect()
    if BACKEND == "jax":
        import jax

        return len(jax.live_arrays())
    if BACKEND == "torch":
        import torch

        kind = torch.Tensor
    else:
        import tensorflow as tf

        kind = tf.Tensor
    return sum(isinstance(x, kind) for x in gc.get_objects())


def test_calls_leave_nothing_behind():
    strategy = mirrored(2)
    with strategy.scope():
        metric = keras.metrics.Mean()
        variable = keras.Variable(0.0, trainable=False, aggregation="mean")

    def replica_fn(x):
        context = keras_dist.get_replica_context()
        metric.update_state(x)
        variable.assign(context.all_reduce("MEAN", keras.ops.mean(x)))
        return context.all_gather(x, axis=0)

    def call():
        x = keras_dist.PerReplica(
            [np.ones((2, 3), "float32"), np.zeros((1, 3), "float32")]
        )
        strategy.gather(strategy.run(replica_fn, args=(x,)), axis=0)

    for _ in range(3):
        call()
    before, threads = _live(), set(threading.enumerate())
    for _ in range(200):
        call()
    assert _live() == before
    assert set(threading.enumerate()) <= threads

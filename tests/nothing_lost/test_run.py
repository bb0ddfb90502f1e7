"""After a replica function failed, nothing of it is left."""

import gc
import threading

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


def _live():
    """How many arrays are alive, and how many threads."""
    gc.collect()
    threads = threading.active_count()
    if BACKEND == "jax":
        import jax

        return len(jax.live_arrays()), threads
    if BACKEND == "torch":
        import torch

        kind = torch.Tensor
    else:
        import tensorflow as tf

        kind = tf.Tensor
    return sum(isinstance(x, kind) for x in gc.get_objects()), threads


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
    before = _live()
    for _ in range(200):
        call()
    assert _live() == before

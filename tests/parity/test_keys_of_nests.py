"""Replicas have the same keys of a dict, in whatever order."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_dist

compiled = pytest.mark.parametrize("compiled", [False, True])
operations = pytest.mark.parametrize(
    "ops_class", [None, keras_dist.ReductionToOneDevice]
)


def mirrored(ops_class=None):
    return keras_dist.MirroredStrategy(
        ["cpu:0", "cpu:1"], cross_device_ops=ops_class and ops_class()
    )


def rows(strategy):
    """Two rows on the first replica, and three on the other."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: ops.ones((2 + context.replica_id_in_sync_group,))
    )


def run(strategy, fn, compiled):
    fn = keras_dist.function(fn) if compiled else fn
    return strategy.run(fn, (rows(strategy),))


def numbers(value):
    return [
        np.asarray(ops.convert_to_numpy(part)).tolist()
        for part in keras_dist.get_strategy().experimental_local_results(value)
    ]


def turned(x, nest):
    """The nest, with its keys turned around on the second replica."""
    return nest if x.shape[0] == 2 else dict(reversed(nest.items()))


@compiled
@operations
def test_each_key_is_reduced_with_itself(ops_class, compiled):
    strategy = mirrored(ops_class)

    def step(x):
        context = keras_dist.get_replica_context()
        nest = turned(x, {"a": ops.sum(x), "b": [-ops.sum(x)], "c": 10.0})
        return context.all_reduce("SUM", nest)

    total = run(strategy, step, compiled)
    with strategy.scope():
        assert numbers(total["a"]) == [5.0, 5.0]
        assert numbers(total["b"][0]) == [-5.0, -5.0]
        assert numbers(total["c"]) == [20.0, 20.0]


@compiled
def test_each_key_is_gathered_with_itself(compiled):
    strategy = mirrored()

    def step(x):
        context = keras_dist.get_replica_context()
        return context.all_gather(turned(x, {"a": x, "b": -x[:1]}), 0)

    every = run(strategy, step, compiled)
    with strategy.scope():
        assert numbers(every["a"]) == [[1.0] * 5] * 2
        assert numbers(every["b"]) == [[-1.0] * 2] * 2


@compiled
def test_a_result_is_found_by_its_key(compiled):
    strategy = mirrored()
    found = run(
        strategy,
        lambda x: [turned(x, {"a": ops.sum(x), "b": -ops.sum(x)})],
        compiled,
    )
    with strategy.scope():
        assert numbers(found[0]["a"]) == [2.0, 3.0]
        assert numbers(found[0]["b"]) == [-2.0, -3.0]


@compiled
@operations
@pytest.mark.parametrize("method", ["all_reduce", "all_gather"])
def test_other_keys_are_refused(method, ops_class, compiled):
    strategy = mirrored(ops_class)
    with strategy.scope():
        v = keras.Variable(0.0, trainable=False, aggregation="mean")

    def step(x):
        context = keras_dist.get_replica_context()
        nest = {"a" if x.shape[0] == 2 else "b": ops.sum(x, keepdims=True)}
        if method == "all_reduce":
            (total,) = context.all_reduce("SUM", nest).values()
        else:
            (total,) = context.all_gather(nest, 0).values()
        v.assign(ops.sum(total))

    with pytest.raises(keras_dist.ReplicaDivergenceError, match=r"of \['b'\]"):
        run(strategy, step, compiled)
    assert float(ops.convert_to_numpy(v)) == 0.0

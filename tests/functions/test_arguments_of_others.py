"""Compiled functions take tensors of others, and per-replica values."""

import numpy as np
import pytest
from keras import ops

import keras_dist
from functions.helpers import BACKEND
from functions.helpers import array
from functions.helpers import ids
from functions.helpers import local
from functions.helpers import strategy_of

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.runs_on("tensorflow")


def _dataset():
    return tf.data.Dataset.from_tensor_slices(np.ones(4, "float32")).batch(2)


def test_elements_of_a_tf_dataset_under_the_default_strategy():
    calls = []

    @keras_dist.function
    def double(x):
        calls.append(x)
        return x * 2.0

    @keras_dist.function
    def nested(batch):
        return batch["x"][0] * 2.0

    for x in _dataset():
        for result in (
            double(x),
            double(x=x),
            nested({"x": (x,)}),
            keras_dist.get_strategy().run(double, args=(x,)),
        ):
            np.testing.assert_array_equal(array(result), [2.0, 2.0])
    if BACKEND == "jax":  # not once for each element
        assert len(calls) <= 6
    found = keras_dist.scan_steps(double, iter(_dataset()), steps=2)
    np.testing.assert_array_equal(array(found), [[2.0, 2.0]] * 2)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_elements_of_a_tf_dataset_under_a_strategy(num_replicas):
    strategy = strategy_of(num_replicas)
    total = keras_dist.function(lambda x: ops.sum(x))
    for x in _dataset():
        found = local(strategy.run(total, args=(x,)))
        assert [float(each) for each in found] == [2.0] * num_replicas


def test_a_per_replica_value_that_is_captured():
    """Each replica has its component, or the message says how it gets it."""
    strategy = strategy_of(2)
    with strategy.scope():
        value = ids(strategy)
        add = keras_dist.function(lambda: ops.add(value, 2.0))
        if BACKEND == "jax":
            with pytest.raises(
                keras_dist.errors.TraceError, match="in `args` of"
            ):
                strategy.run(add)
        else:
            found = local(strategy.run(add))
            assert [float(each) for each in found] == [2.0, 3.0]
        passed = keras_dist.function(lambda d: ops.add(d["x"], 2.0))
        found = local(strategy.run(passed, args=({"x": value},)))
        assert [float(each) for each in found] == [2.0, 3.0]

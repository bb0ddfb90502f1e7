"""Replicas make the same variables, which take what plain Keras takes."""

import keras
import numpy as np
import pytest

import keras_dist
from conformance.helpers import function
from gradients.helpers import array
from gradients.helpers import strategy_of


@pytest.mark.parametrize("what", ["name", "shape", "dtype"])
def test_replicas_that_make_different_ones(what):
    strategy = strategy_of(2)

    def make():
        index = keras_dist.get_replica_context().replica_id_in_sync_group
        declared = {
            "name": {"name": f"v_{index}", "shape": ()},
            "shape": {"name": "v", "shape": (index + 1,)},
            "dtype": {
                "name": "v",
                "shape": (),
                "dtype": ["float32", "float16"][index],
            },
        }[what]
        return keras.Variable(initializer="zeros", **declared)

    with (
        strategy.scope(),
        pytest.raises(
            keras_dist.errors.ReplicaDivergenceError,
            match="made different variables",
        ),
    ):
        strategy.run(make)


VALUES = [[1.0, 2.0], (1.0, 2.0), [1, 2], 2.0, 2, True, np.ones(2, "float64")]


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize("aggregation", ["none", "mean"])
def test_what_plain_keras_takes_can_be_assigned(value, aggregation):
    def change(variable):
        for method in ("assign_add", "assign_sub", "assign_sub"):
            getattr(variable, method)(value)
        if np.ndim(value):
            variable.assign(value)
        variable.assign_add(value)
        return variable + 0.0

    plain = keras.Variable([1.0, 2.0])
    expected = [array(change(plain)) for _ in range(3)]
    strategy = strategy_of(2)
    with strategy.scope():
        v = keras.Variable([1.0, 2.0], aggregation=aggregation)
        change(v)
        np.testing.assert_allclose(array(v), expected[0])
        strategy.run(change, args=(v,))
        np.testing.assert_allclose(array(v), expected[1])
        strategy.run(function(change), args=(v,))
        np.testing.assert_allclose(array(v), expected[2])

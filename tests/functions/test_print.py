"""`keras_dist.print` prints the values of each call, compiled or not."""

import keras
import numpy as np
import pytest

import keras_dist
from functions.helpers import cut
from functions.helpers import ids
from functions.helpers import numbers
from functions.helpers import strategy_of


def test_outside_of_functions_it_is_the_print_of_python(capfd):
    keras_dist.print("a", 1, [2.5, {"b": None}], sep="-", end="!\n")
    keras_dist.print()
    assert capfd.readouterr().out == "a-1-[2.5, {'b': None}]!\n\n"


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_compiled_it_prints_values_in_each_call(capfd, num_replicas):
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        v = keras.Variable(7.5)

    @keras_dist.function
    def step(x):
        keras_dist.print("x is", x, "and v", v, sep=" ", end=".\n")
        return x + 1

    x = cut(np.arange(10.0, 10.0 + num_replicas, dtype="float32"), num_replicas)
    strategy.run(step, (x,))
    capfd.readouterr()
    for _ in range(2):
        numbers(strategy.run(step, (x,)))
        if keras.backend.backend() == "jax":
            import jax

            jax.effects_barrier()
        lines = sorted(capfd.readouterr().out.splitlines())
        assert len(lines) == num_replicas
        for index, line in enumerate(lines):
            prefix = f"replica {index}: " if num_replicas > 1 else ""
            assert line.startswith(f"{prefix}x is ")
            assert f"1{index}" in line and "7.5" in line
            assert line.endswith(".")


def test_in_an_uncompiled_replica_function(capfd):
    strategy = strategy_of(2)
    strategy.run(lambda x: keras_dist.print("seen"), (ids(strategy),))
    out = capfd.readouterr().out
    assert out == "replica 0: seen\nreplica 1: seen\n"

"""In the graph of a step, what is assigned waits for what is checked."""

import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
from step_graphs import graph_of

import keras_dist


class StepCounter(keras.layers.Layer):
    """An integer assigned in `call`: replicas have to agree on it."""

    def build(self, input_shape):
        self.steps = self.add_weight(
            shape=(), initializer="zeros", dtype="int32", trainable=False
        )

    def call(self, x):
        self.steps.assign_add(1)
        return x


def _all_before(operation):
    """Everything that a graph computes before an operation."""
    before, todo = set(), [operation]
    while todo:
        last = todo.pop()
        inputs = [tensor.op for tensor in last.inputs]
        new = {*inputs, *last.control_inputs} - before
        before |= new
        todo += new
    return before


def test_assignments_wait_for_the_check_of_integers():
    strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((3,)), StepCounter(), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
    data = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")
    model.train_on_batch(*data)
    operations = graph_of(model, *data).get_operations()
    (check, *_) = [op for op in operations if op.type in ("Assert", "If")]
    changes = [op for op in operations if op.type.startswith("Assign")]
    # The kernel, the bias, the iterations and the integer, on each device.
    assert len(changes) >= 2 * 4
    late = [op for op in changes if check in _all_before(op)]
    metrics = len(model.metrics_variables)
    assert len(late) >= len(changes) - metrics


AFTER_THE_DEFAULT_STRATEGY = """
import keras_dist

strategy = keras_dist.get_strategy()
strategy.run(lambda: None)
with strategy.scope():
    pass
from backends.tensorflow import test_atomic

test_atomic.test_assignments_wait_for_the_check_of_integers()
"""


def test_assignments_wait_whichever_strategy_is_the_first():
    here = pathlib.Path(__file__).parent
    paths = [str(here.parents[1]), str(here)]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    done = subprocess.run(
        [sys.executable, "-c", AFTER_THE_DEFAULT_STRATEGY],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr

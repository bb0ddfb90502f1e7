"""Batches whose arrays have unequal lengths are computed as on one device.

Nobody knows which of their axes is the batch's, so that they are not cut, in
whatever order the arrays come.
"""

import keras
import numpy as np
import pytest
from keras import layers
from keras import ops

from inputs.helpers import installed
from parity.harness import BACKEND
from parity.harness import JIT
from parity.harness import assert_same
from parity.harness import drop_iterations
from parity.harness import flat
from parity.harness import scope
from parity.harness import state_of
from parity.harness import strategy

# Keras says it of every source whose length it did not know.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
    pytest.mark.filterwarnings("ignore:The arrays of a batch have different"),
]

ROWS, ENTRIES, FEATURES = 6, 4, 5
# The order of arrays in a batch is that of their names.
NAMES = ("a_table", "z_table")


class Lookup(keras.Model):
    """Scores rows against the entries of a table, an input like any other."""

    def __init__(self, table):
        super().__init__()
        self.table = table
        self.dense = layers.Dense(FEATURES, kernel_initializer="ones")

    def call(self, inputs):
        queries = self.dense(inputs["rows"])
        return ops.matmul(queries, ops.transpose(inputs[self.table]))


def _batches(table, count=3):
    rng = np.random.default_rng(1)
    for _ in range(count):
        inputs = {
            table: rng.normal(size=(ENTRIES, FEATURES)).astype("float32"),
            "rows": rng.normal(size=(ROWS, FEATURES)).astype("float32"),
        }
        yield inputs, rng.normal(size=(ROWS, ENTRIES)).astype("float32")


def _tf_data(table):
    """Of unknown lengths: whether they are equal is known at run time."""
    import tensorflow as tf

    unknown = tf.TensorSpec((None, FEATURES))
    return tf.data.Dataset.from_generator(
        lambda: _batches(table),
        output_signature=(
            {table: unknown, "rows": unknown},
            tf.TensorSpec((None, ENTRIES)),
        ),
    )


def _outcome(num_replicas, table, make_data):
    with scope(num_replicas):
        model = Lookup(table)
        model.compile("sgd", "mse", metrics=["mae"], jit_compile=JIT)
        # With no data of theirs known, layers are built before `fit`.
        model(next(_batches(table))[0])
    history = model.fit(make_data(table), shuffle=False, verbose=0).history
    logs = model.evaluate(make_data(table), verbose=0, return_dict=True)
    inputs, _ = next(_batches(table))
    return (
        flat("history", history)
        | flat("evaluate", logs)
        | flat("predict", model.predict_on_batch(inputs))
        | state_of(model)
    )


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("table", NAMES)
def test_a_generator(table, num_replicas):
    actual = _outcome(num_replicas, table, _batches)
    expected = _outcome(None, table, _batches)
    drop_iterations(actual, expected)
    assert_same(actual, expected)


@installed("tensorflow")
@pytest.mark.parametrize("table", NAMES)
def test_tf_data_of_unknown_lengths(table):
    actual = _outcome(3, table, _tf_data)
    expected = _outcome(None, table, _tf_data)
    drop_iterations(actual, expected)
    assert_same(actual, expected)


@pytest.mark.parametrize(
    "make_data",
    [_batches, pytest.param(_tf_data, marks=installed("tensorflow"))],
)
def test_it_is_said_once_and_as_explain_says_it(make_data):
    inputs, y = next(_batches("a_table"))
    two = strategy(2)
    with two.scope():
        model = Lookup("a_table")
        model.compile("sgd", "mse", jit_compile=JIT)
        model(inputs)
    with pytest.warns(UserWarning) as caught:
        model.fit(make_data("a_table"), shuffle=False, verbose=0)
        model.evaluate(make_data("a_table"), verbose=0)
    (text,) = {
        str(warning.message)
        for warning in caught
        if "different numbers of rows" in str(warning.message)
    }
    assert f"({ENTRIES}, {ROWS})" in text
    who = "Each replica" if BACKEND == "jax" else "Replica 0"
    assert f"{who} computes the whole batch" in text
    said = [w for w in caught if text in str(w.message)]
    assert len(said) == 1
    assert text in two.explain((inputs, y)).notes

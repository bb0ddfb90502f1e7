"""Sparse batches, which JAX does not split, give one device's numbers."""

import keras
import numpy as np
import pytest
from keras import layers

from parity.harness import BACKEND
from parity.harness import assert_same
from parity.harness import flat
from parity.harness import scope
from parity.harness import set_initial_weights
from parity.harness import state_of

pytestmark = pytest.mark.only_on(
    "jax", "tensorflow", reason="Keras has no sparse inputs on PyTorch."
)


def _outcome(count):
    tf = pytest.importorskip("tensorflow")

    rng = np.random.default_rng(0)
    bags = (rng.random((22, 9)) < 0.3).astype("float32")
    y = rng.normal(size=(22, 1)).astype("float32")
    rows = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(bags), y))
    data = rows.batch(8)
    with scope(count):
        inputs = keras.Input((9,), sparse=True)
        model = keras.Model(inputs, layers.Dense(1)(layers.Dense(3)(inputs)))
        set_initial_weights(model).compile(keras.optimizers.SGD(0.1), "mse")
    history = model.fit(data, shuffle=False, epochs=2, verbose=0).history
    return (
        flat("history", history)
        | flat("predicted", model.predict(data, verbose=0))
        | state_of(model)
    )


@pytest.mark.parametrize("count", [2, 3])
def test_same_numbers(count):
    plain = _outcome(None)
    if BACKEND != "jax":
        assert_same(_outcome(count), plain)
        return
    with pytest.warns(UserWarning, match="(?s)has a sparse array.*not split"):
        ours = _outcome(count)
    assert_same(ours, plain)

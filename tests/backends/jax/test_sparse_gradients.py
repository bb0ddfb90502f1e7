"""Optimizers take JAX's sparse gradients, in a scope as in plain Keras."""

import keras
import numpy as np
import pytest
from jax.experimental import sparse

from parity import harness


def _new_values(scope, make_optimizer, is_sparse):
    with scope:
        variable = keras.Variable(np.ones((5, 2), "float32"))
        optimizer = make_optimizer()
        optimizer.build([variable])
    gradient = sparse.BCOO(
        (np.full((2, 2), 3.0, "float32"), np.array([[0], [3]])), shape=(5, 2)
    )
    if not is_sparse:
        gradient = gradient.todense()
    (value,), _ = optimizer.stateless_apply(
        [v.value for v in optimizer.variables], [gradient], [variable.value]
    )
    return harness.to_numpy(value)


@pytest.mark.parametrize("make", [harness.strategy, harness.central])
@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda: keras.optimizers.SGD(0.5),
        lambda: keras.optimizers.Adagrad(0.5),
        lambda: keras.optimizers.RMSprop(0.5),
    ],
    ids=["sgd", "adagrad", "rmsprop"],
)
def test_a_sparse_gradient_updates_as_the_dense_one(make_optimizer, make):
    expected = _new_values(harness.scope(None), make_optimizer, False)
    ours = _new_values(make(2).scope(), make_optimizer, True)
    np.testing.assert_allclose(ours, expected, rtol=1e-6)

"""Optimizers that users wrote see the gradients of the global batch."""

import keras
import pytest
from keras import ops

from parity import models
from parity.harness import FIT
from parity.harness import assert_same
from parity.harness import compiled
from parity.harness import fitted


class Signs(keras.optimizers.SGD):
    """Descends by the signs of gradients: of their sum, not of each share."""

    def apply(self, grads, trainable_variables=None):
        grads = [ops.sign(gradient) for gradient in grads]
        super().apply(grads, trainable_variables)


class Shorter:
    """A mixin that makes gradients shorter by their common norm."""

    def apply(self, grads, trainable_variables=None):
        norm = ops.sqrt(sum(ops.sum(ops.square(g)) for g in grads))
        grads = [gradient / (0.1 + norm) for gradient in grads]
        super().apply(grads, trainable_variables)


class ShorterAdam(Shorter, keras.optimizers.Adam):
    pass


def later():
    class Later(Shorter, keras.optimizers.RMSprop):
        """Made when strategies are at work already."""

        def apply(self, grads, trainable_variables=None):
            super().apply([g * ops.abs(g) for g in grads], trainable_variables)

    return Later(0.05, epsilon=1e-3)


OPTIMIZERS = {
    "signs": lambda: Signs(0.05),
    "mixin": lambda: ShorterAdam(0.05, epsilon=1e-3),
    "later": later,
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        Signs(0.05), initial_scale=8.0
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_apply_of_their_own(name):
    ours, plain = (
        fitted(
            compiled(count, models.mlp, OPTIMIZERS[name]),
            **models.table(14),
            **FIT,
        )
        for count in (2, None)
    )
    assert_same(ours, plain, rtol=1e-4)

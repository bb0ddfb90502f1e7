"""Optimizers that users wrote see the gradients of the global batch."""

import keras
import pytest
from keras import layers
from keras import ops

from parity import models
from parity.harness import FIT
from parity.harness import JIT
from parity.harness import assert_same
from parity.harness import fitted
from parity.harness import scope
from parity.harness import set_initial_weights


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


def _optimizers():
    class Later(keras.optimizers.RMSprop):
        """Made when strategies are at work already."""

        def apply(self, grads, trainable_variables=None):
            super().apply([g * ops.abs(g) for g in grads], trainable_variables)

    return {
        "signs": Signs(0.05),
        "mixin": ShorterAdam(0.05, epsilon=1e-3),
        "later": Later(0.05, epsilon=1e-3),
        "scaled": keras.optimizers.LossScaleOptimizer(
            Signs(0.05), initial_scale=8.0
        ),
    }


@pytest.mark.parametrize("name", ["signs", "mixin", "later", "scaled"])
def test_an_apply_of_their_own(name):
    def outcome(num_replicas):
        with scope(num_replicas):
            model = set_initial_weights(
                keras.Sequential(
                    [
                        keras.Input((4,)),
                        layers.Dense(5, activation="tanh"),
                        layers.Dense(1),
                    ]
                )
            )
            model.compile(_optimizers()[name], "mse", jit_compile=JIT)
        return fitted(model, **models.table(14), **FIT)

    assert_same(outcome(2), outcome(None), rtol=1e-4)

"""A model's own `metrics` property, as in Keras' guides, hides others.

Keras' steps update the hidden ones all the same: the running loss, and the
metrics of `compile`.
"""

import keras
import pytest
from keras import layers
from keras import ops

from parity import models
from parity.harness import JIT
from parity.harness import assert_same
from parity.harness import flat
from parity.harness import scope
from parity.harness import set_initial_weights
from parity.harness import state_of


class OwnMetrics(keras.Model):
    """Shows a tracker of its own and nothing else."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.size = keras.metrics.Mean(name="size")

    @property
    def metrics(self):
        return [self.size]

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        self.size.update_state(ops.sum(ops.square(y_pred), axis=-1))
        return super().compute_loss(
            x=x,
            y=y,
            y_pred=y_pred,
            sample_weight=sample_weight,
            training=training,
        )


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_own_metrics_property(num_replicas):
    def outcome(count):
        with scope(count):
            x = layers.Input((4,))
            model = OwnMetrics(x, layers.Dense(1)(x))
            set_initial_weights(model)
            model.compile("sgd", "mse", metrics=["mae"], jit_compile=JIT)
        data = models.table(21)
        options = {"batch_size": 7, "verbose": 0}
        history = model.fit(**data, **options, epochs=2, shuffle=False).history
        logs = model.evaluate(**data, **options, return_dict=True)
        return (
            flat("history", history) | flat("evaluate", logs) | state_of(model)
        )

    assert_same(outcome(num_replicas), outcome(None))


class Spread(keras.metrics.Mean):
    """Overrides `__call__`, with what couples the rows."""

    def __call__(self, y_true, *, y_pred):
        centered = y_pred - ops.mean(y_pred, axis=0, keepdims=True)
        return super().__call__(ops.square(centered) + 0.0 * y_true)


class Spreads(keras.Model):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.spread = Spread(name="spread")

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        value = self.spread(y, y_pred=y_pred)
        return self.get_metrics_result() | {"same": value}


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_a_metric_with_a_call_of_its_own(num_replicas):
    def outcome(count):
        with scope(count):
            x = layers.Input((4,))
            model = set_initial_weights(Spreads(x, layers.Dense(1)(x)))
            model.compile("sgd", "mse", jit_compile=JIT)
        history = model.fit(
            **models.table(21), batch_size=7, shuffle=False, verbose=0
        )
        return flat("history", history.history)

    assert_same(outcome(num_replicas), outcome(None))

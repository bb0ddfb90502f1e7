"""A model's own `metrics` property, as in Keras' guides, hides others.

Keras' steps update the hidden ones all the same: the running loss, and the
metrics of `compile`.
"""

import keras
import pytest
from keras import layers
from keras import ops

from parity import models
from parity.harness import assert_same
from parity.harness import compiled
from parity.harness import results


class OwnMetrics(keras.Sequential):
    """Shows a tracker of its own and nothing else."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.size = keras.metrics.Mean(name="size")

    @property
    def metrics(self):
        return [self.size]

    def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
        self.size.update_state(ops.sum(ops.square(y_pred), axis=-1))
        return super().compute_loss(x, y, y_pred, *args, **kwargs)


class Spread(keras.metrics.Mean):
    """Overrides `__call__`, with what couples the rows."""

    def __call__(self, y_true, *, y_pred):
        centered = y_pred - ops.mean(y_pred, axis=0, keepdims=True)
        return super().__call__(ops.square(centered) + 0.0 * y_true)


class Spreads(keras.Sequential):
    """Logs what a metric with a call of its own returns."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.spread = Spread(name="spread")

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        value = self.spread(y, y_pred=y_pred)
        return self.get_metrics_result() | {"same": value}


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize(
    ("cls", "metrics"), [(OwnMetrics, ["mae"]), (Spreads, None)]
)
def test_same_numbers(cls, metrics, num_replicas):
    def build():
        return cls([layers.Input((4,)), layers.Dense(1)])

    ours, plain = (
        results(compiled(count, build, metrics=metrics), models.table(21))
        for count in (num_replicas, None)
    )
    assert_same(ours, plain)

"""Metrics that are sums over rows are added up, and no others."""

import keras
import numpy as np
import pytest

from keras_dist.fit.adding import rows_that_add_up

ROWS = np.ones((4, 3), "float32")
LABELS = np.ones((4,), "int32")
metrics = keras.metrics


def _wrapped(fn):
    return lambda: metrics.MeanMetricWrapper(fn)


class OfOneself(metrics.Mean):
    def update_state(self, values, sample_weight=None):
        super().update_state(keras.ops.max(values), sample_weight)


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (metrics.Mean, (ROWS,)),
        (metrics.Sum, (ROWS, ROWS[:, 0])),
        (metrics.MeanSquaredError, (ROWS, ROWS)),
        (metrics.BinaryAccuracy, (ROWS, ROWS, ROWS[:, 0])),
        (metrics.CosineSimilarity, (ROWS, ROWS)),
        (metrics.SparseCategoricalAccuracy, (LABELS, ROWS)),
        (metrics.SparseCategoricalCrossentropy, (LABELS[:, None], ROWS)),
    ],
)
def test_sums_over_rows(make, arguments):
    adds_up = rows_that_add_up(make())
    assert adds_up(*arguments)
    assert adds_up(*(each[:1] for each in arguments))
    # What both halves add is what all rows add.
    variables = []
    for parts in ([arguments], [[a[:1] for a in arguments]]):
        metric = make()
        for part in parts:
            metric.update_state(*part)
        variables.append([float(each.value) for each in metric.variables])
    whole, first = variables
    assert whole == pytest.approx([4 * each for each in first], rel=1e-5)


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (metrics.Mean, (0.5,)),
        (metrics.Mean, (ROWS, 2)),
        (OfOneself, (ROWS,)),
        (metrics.RootMeanSquaredError, (ROWS, ROWS)),
        (metrics.AUC, (ROWS, ROWS)),
        # The mean over all rows, which is one value.
        (metrics.MeanSquaredError, (ROWS[:, 0], ROWS[:, 0])),
        (lambda: metrics.CosineSimilarity(axis=0), (ROWS, ROWS)),
        (_wrapped(keras.losses.circle), (LABELS, ROWS)),
        (_wrapped(lambda a, b: a - b), (ROWS, ROWS)),
        (_wrapped(keras.losses.Circle(reduction=None)), (LABELS, ROWS)),
    ],
)
def test_others(make, arguments):
    assert not rows_that_add_up(make())(*arguments)

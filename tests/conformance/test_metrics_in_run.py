"""Metrics and losses in `run` count every row of all replicas once."""

import keras
import numpy as np
import pytest

import keras_dist
from conformance.contract import contract
from conformance.helpers import local
from conformance.helpers import replica_id
from conformance.helpers import tensor
from conformance.helpers import to_numpy
from conformance.variables import copies
from conformance.variables import parts
from conformance.variables import shares


def _result(metric):
    return to_numpy(metric.result()).tolist()


@contract(212)
def test_a_metric_counts_every_row_once(api, strategy):
    with strategy.scope():
        metrics = [keras.metrics.Mean(), keras.metrics.Mean()]

    def step(rows):
        for metric in metrics:
            metric.update_state(rows)

    for start in range(0, 10, 2):
        rows = np.arange(start, start + 2, dtype="float32")
        strategy.run(step, (shares(strategy, rows),))
    assert [_result(metric) for metric in metrics] == [4.5, 4.5]


@contract(213)
def test_a_metric_from_outside_is_updated_in_scope(api, strategy):
    metric = keras.metrics.Mean()
    with strategy.scope():
        for start in range(0, 10, 2):
            metric.update_state([float(start), float(start + 1)])
    assert _result(metric) == 4.5


@contract(214)
def test_updates_of_both_contexts_add_up(api, two):
    with two.scope():
        metric = keras.metrics.Mean()

    def step():
        metric.update_state(tensor(float(replica_id(api) + 1)))
        return metric.result()

    seen = two.run(step)
    if api is keras_dist:  # each replica reads its own part
        assert [x.tolist() for x in local(seen)] == [1.0, 2.0]
    assert _result(metric) == 1.5
    metric.update_state(5.0)
    np.testing.assert_allclose(_result(metric), 8 / 3, rtol=1e-6)
    metric.reset_state()
    assert _result(metric) == 0.0
    two.run(step)
    assert _result(metric) == 1.5


@contract(214, native=False)
def test_the_state_of_a_metric_starts_as_its_total(api, two):
    class Counting(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="counting")
            self.count = self.add_variable(
                (), keras.initializers.Constant(6.0), name="count"
            )

        def update_state(self, value):
            self.count.assign_add(value)

        def result(self):
            return self.count.value

    with two.scope():
        metric = Counting()
    assert _result(metric) == 6.0
    two.run(lambda: metric.update_state(1.0))
    assert _result(metric) == 8.0
    assert sum(copies(metric.count)) == 8.0


METRICS = {
    "accuracy": keras.metrics.BinaryAccuracy,
    "auc": lambda: keras.metrics.AUC(num_thresholds=20),
    "precision": keras.metrics.Precision,
    "mean squared error": keras.metrics.MeanSquaredError,
    "root": keras.metrics.RootMeanSquaredError,
    "r2": keras.metrics.R2Score,
    "f1": lambda: keras.metrics.F1Score(threshold=0.5),
}


@contract(212, native=False)
@pytest.mark.parametrize("name", METRICS)
def test_metrics_are_those_of_all_rows(api, mirrored, name):
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 2, (11, 1)).astype("float32")
    scores = rng.random((11, 1)).astype("float32")
    weights = rng.random(11).astype("float32")
    alone = METRICS[name]()
    with mirrored.scope():
        metric = METRICS[name]()
    for rows in (slice(0, 8), slice(8, 11), slice(0, 1)):
        arrays = labels[rows], scores[rows], weights[rows]
        alone.update_state(*arrays)
        mirrored.run(
            metric.update_state,
            tuple(shares(mirrored, array) for array in arrays),
        )
    np.testing.assert_allclose(_result(metric), _result(alone), rtol=1e-5)


@contract(215)
@pytest.mark.parametrize(
    "reduction", ["sum_over_batch_size", "mean", "mean_with_sample_weight"]
)
def test_means_of_a_loss_are_divided_among_the_replicas(
    api, mirrored, reduction
):
    n = mirrored.num_replicas_in_sync
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    targets = np.zeros((2 * n, 1), "float32")
    outputs = np.arange(2 * n, dtype="float32").reshape(-1, 1)
    values = mirrored.run(
        loss, (shares(mirrored, targets), shares(mirrored, outputs))
    )
    total = mirrored.reduce("SUM", values, axis=None)
    np.testing.assert_allclose(
        to_numpy(total), np.mean(np.square(outputs)), rtol=1e-6
    )


@contract(215)
@pytest.mark.parametrize("reduction", ["sum", None])
def test_other_losses_are_as_they_are(api, two, reduction):
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    values = two.run(
        loss,
        (
            parts(two, [[[0.0], [0.0]]] * 2),
            parts(two, [[[1.0], [2.0]], [[3.0], [0.0]]]),
        ),
    )
    expected = [5.0, 9.0] if reduction else [[1.0, 4.0], [9.0, 0.0]]
    assert [x.tolist() for x in local(values)] == expected

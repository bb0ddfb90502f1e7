"""What replicas have, joined into what one device would have had."""

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from keras_dist.core.rows import RowShard
from keras_dist.core.rows import bounds
from keras_dist.replica.exchange import join
from keras_dist.replica.exchange import mean_over_rows
from keras_dist.replica.exchange import sum_over_replicas

SHARES = [RowShard(2, 5), RowShard(3, 5), RowShard(0, 5)]


def mean(*values):
    tensors = [keras.ops.convert_to_tensor(value) for value in values]
    result = mean_over_rows(tensors, SHARES[: len(values)])
    return float(keras.ops.convert_to_numpy(result))


def test_each_counts_as_its_rows_do():
    assert mean(1.0, 2.0) == pytest.approx(0.4 * 1 + 0.6 * 2)


@pytest.mark.parametrize("value", [0.1, 1 / 3, float("inf"), -float("inf")])
def test_equal_values_stay_what_they_are(value):
    assert mean(value, value) == np.float32(value)


def test_infinity_is_not_lost():
    assert mean(float("inf"), 1.0) == float("inf")
    assert mean(1.0, float("inf")) == float("inf")


def test_nan_of_a_replica_without_rows_counts_nowhere():
    assert mean(1.0, 1.0, float("nan")) == pytest.approx(1.0)


def test_integers_are_the_first_replicas():
    assert mean_over_rows([3, 4], SHARES[:2]) == 3


def test_counts_are_summed():
    assert sum_over_replicas([2, 3, 1], SHARES) == 5


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 20), st.integers(1, 5))
def test_rows_come_back_in_order(rows, replicas):
    values = np.arange(3 * rows, dtype="float32").reshape(rows, 3)
    edges = bounds(rows, replicas)
    everyone = []
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        # A replica without rows runs on a copy of some row.
        own = values[start : max(stop, start + 1)] if start < rows else values
        leaves = [keras.ops.convert_to_tensor(own[: max(stop - start, 1)]), 7]
        everyone.append((leaves, RowShard(stop - start, rows)))
    joined, seven = join([0, 0], everyone, mean_over_rows)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(joined), values)
    assert seven == 7

"""Equal values of replicas stay what they are, and infinity is not lost."""

import keras
import numpy as np
import pytest

from keras_dist.core.rows import RowShard
from keras_dist.replica.exchange import mean_over_rows

SHARES = [RowShard(2, 5), RowShard(3, 5), RowShard(0, 5)]


def mean(*values):
    tensors = [keras.ops.convert_to_tensor(value) for value in values]
    result = mean_over_rows(tensors, SHARES[: len(values)])
    return float(keras.ops.convert_to_numpy(result))


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

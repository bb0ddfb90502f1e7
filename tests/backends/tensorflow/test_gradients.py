"""The replicas' gradients are summed by their weights."""

import pytest
import tensorflow as tf

from keras_dist_tensorflow.gradients import weighted_sum
from keras_dist_tensorflow.origins import StepSizes


@pytest.mark.parametrize("convert", [float, tf.constant])
def test_a_replica_of_no_weight_adds_nothing_even_if_it_has_nan(convert):
    nan, one = tf.fill((2,), float("nan")), tf.ones((2,))
    weights = [convert(0.0), convert(0.5)]
    found = [
        weighted_sum(each, weights, StepSizes(), "name")
        for each in ([nan, one], [nan, None])
    ]
    assert [each.numpy().tolist() for each in found] == [[0.5, 0.5], [0.0, 0.0]]

"""Sums of the replicas' gradients."""

import torch

from keras_dist_torch.gradients import weighted_sum


def test_a_replica_of_no_weight_adds_nothing_even_if_it_has_nan():
    nan, one = torch.full((2,), torch.nan), torch.ones(2)
    gradients = [[nan, nan], [one, None]]
    found = weighted_sum(gradients, [0.0, 0.5], torch.device("cpu"))
    assert [each.tolist() for each in found] == [[0.5, 0.5], [0.0, 0.0]]

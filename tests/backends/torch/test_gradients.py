"""The replicas' gradients are summed by their weights."""

import keras
import pytest
import torch

from keras_dist.core.plan import Cluster
from keras_dist.experimental import CommunicationOptions
from keras_dist.plugin.workers import Workers
from keras_dist_torch.buckets import Overlap
from keras_dist_torch.gradients import weighted_sum
from keras_dist_torch.sums import ExpectedSums
from keras_dist_torch.workers import TorchWorkers


def test_a_replica_of_no_weight_adds_nothing_even_if_it_has_nan():
    nan, one = torch.full((2,), torch.nan), torch.ones(2)
    gradients = [[nan, nan], [one, None]]
    found = weighted_sum(gradients, [0.0, 0.5], torch.device("cpu"))
    assert [each.tolist() for each in found] == [[0.5, 0.5], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("weight", "expected"), [(0.0, [0.0, 0.0]), (0.5, [1.0, 2.0]), (1.0, None)]
)
def test_gradients_of_the_one_replica_are_weighted_in_their_bucket(
    weight, expected
):
    """The sum of one worker, which sends nothing."""
    alone = object.__new__(TorchWorkers)
    cluster = Cluster(0, "leader:1", ("leader:1",))
    Workers.__init__(alone, cluster, CommunicationOptions())
    alone.sums = ExpectedSums(alone.start_sum, torch.device("cpu"))
    alone.swap = lambda own: own[None]
    values = [2.0, 4.0] if weight else [torch.nan, torch.inf]
    variable = keras.Variable([0.0, 0.0])
    given = torch.tensor(values)
    numbers = [torch.tensor(3.0), 5]
    sums, *told = Overlap(alone, torch.device("cpu")).sum(
        [[given]], [[given]], [weight], [variable], numbers
    )
    assert sums.tolist() == (expected or values)
    # Numbers have their weights already.
    assert [each.item() for each in told] == [3.0, 5.0]
    # A step may use the gradient for something else.
    assert str(given.tolist()) == str(values)

"""`Strategy.reduce`."""

import keras

from conformance.contract import contract
from conformance.helpers import to_numpy


@contract(49)
def test_sum_of_ones_is_the_number_of_replicas(api, strategy):
    ones = strategy.run(lambda: keras.ops.convert_to_tensor(1.0))
    total = strategy.reduce("SUM", ones, axis=None)
    assert to_numpy(total) == strategy.num_replicas_in_sync

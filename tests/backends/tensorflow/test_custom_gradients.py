"""TensorFlow's own `custom_gradient` has one device's gradients."""

import pytest
import tensorflow as tf

from parity.harness import assert_same
from parity.harness import plain
from parity.harness import train
from parity.test_custom_gradients import CHANGES
from parity.test_custom_gradients import case_of


@pytest.mark.parametrize("name", CHANGES)
def test_fit(name):
    def call(self, x):
        @tf.custom_gradient
        def multiplied(x):
            def grad(slope, variables=()):
                slope = CHANGES[name](slope)
                own = [tf.reduce_sum(slope * x) for _ in variables]
                return slope * factor, own

            factor = self.factor.value
            return x * tf.convert_to_tensor(factor), grad

        return multiplied(x)

    case = case_of(name, call=call)
    assert_same(train(case, 2), plain(case))

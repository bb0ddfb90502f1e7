"""`fit` gives one device's numbers where variables are on a device apart."""

import keras
import numpy as np
import pytest

from parity import cases
from parity import harness
from parity.harness import BACKEND
from parity.harness import assert_same
from parity.harness import central
from parity.harness import plain
from parity.harness import train

CASES = [case for case in cases.CASES if BACKEND in case.backends]


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_same_numbers(case):
    # Dropout on several replicas has other masks than on one device.
    num_replicas = min(2, max(case.replicas))
    assert_same(train(case, num_replicas, central), plain(case), case.rtol)


@pytest.mark.parametrize("make", [harness.strategy, harness.central])
def test_run_eagerly_is_set_after_training(make):
    """Keras' own trainer goes on with the function that it has."""
    x, y = np.random.default_rng(0).normal(size=(2, 8, 3)).astype("float32")
    weights = []
    for count in (None, 2):
        with harness.scope(count, make):
            keras.utils.set_random_seed(0)
            layer = keras.layers.Dense(3)
            model = keras.Sequential([keras.Input((3,)), layer])
            model.compile("adam", "mse")
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        model.run_eagerly = True
        model.train_on_batch(x, y)
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for ours, theirs in zip(*weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)

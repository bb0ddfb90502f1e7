"""Half precision trains as plain Keras does, and skips what overflows."""

import keras
import numpy as np
import pytest

from gpu import models
from gpu import numbers
from gpu.numbers import STRATEGIES

POLICIES = ("mixed_float16", "mixed_bfloat16")
# Numbers of 11 and of 8 bits.
TOLERANCES = {"mixed_float16": 2e-2, "mixed_bfloat16": 1e-1}
MOST_ROWS = 2.5


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["mirrored", "central"])
def test_mixed_precision(name, policy):
    with numbers.plain_keras():
        expected = numbers.state_of(
            *numbers.trained(None, "mlp", policy=policy)
        )
    model, history = numbers.trained(STRATEGIES[name](), "mlp", policy=policy)
    state = numbers.state_of(model, history)
    # A row between two classes may count as either.
    right, expected_right = state.pop("accuracy"), expected.pop("accuracy")
    assert np.abs(right - expected_right).max() <= MOST_ROWS / numbers.ROWS
    numbers.assert_same(state, expected, TOLERANCES[policy])
    assert all(v.dtype == "float32" for v in model.trainable_variables)
    assert model.layers[0].compute_dtype == policy.removeprefix("mixed_")


@pytest.mark.parametrize("name", ["mirrored", "central"])
def test_loss_scaling_skips_steps_that_overflow(name):
    with STRATEGIES[name]().scope():
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.05), initial_scale=2.0**40
        )
        model = models.compiled("mlp", "mixed_float16", optimizer=optimizer)
    x, y = models.data("mlp", 16)
    before = [models.to_numpy(v) for v in model.trainable_variables]
    model.fit(x, y, batch_size=16, verbose=0)
    for old, new in zip(before, model.trainable_variables, strict=True):
        assert np.array_equal(old, models.to_numpy(new))
    assert float(models.to_numpy(optimizer.dynamic_scale)) == 2.0**39
    model.fit(x, y, batch_size=16, epochs=40, verbose=0)
    assert float(models.to_numpy(optimizer.dynamic_scale)) < 2.0**30
    assert not np.array_equal(
        before[0], models.to_numpy(model.trainable_variables[0])
    )

"""Backward passes of the user's own see gradients as large as one device's."""

import keras
import numpy as np
import pytest
from keras import layers
from keras import ops

from parity import models
from parity.harness import Case
from parity.harness import assert_same
from parity.harness import central
from parity.harness import plain
from parity.harness import train

CHANGES = {
    "clipped": lambda slope: ops.clip(slope, -0.03, 0.03),
    "rounded": lambda slope: ops.round(slope * 64) / 64,
    "signs": lambda slope: 0.01 * ops.sign(slope),
    "reversed": lambda slope: -2.0 * slope,
}


class Changed(layers.Layer):
    """Multiplies by a variable; its backward pass changes gradients."""

    change = None

    def build(self, input_shape):
        self.factor = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        @ops.custom_gradient
        def multiplied(x, factor):
            def grad(*args, upstream=None):
                slope = args[0] if upstream is None else upstream
                slope = type(self).change(slope)
                return slope * factor, ops.sum(slope * x)

            return x * factor, grad

        return multiplied(x, ops.convert_to_tensor(self.factor))


def case_of(name, data=models.table, **attributes):
    attributes = {"change": staticmethod(CHANGES[name]), **attributes}
    layer = type("Changed", (Changed,), attributes)
    return Case(
        f"{name}-{data.__name__}-{sorted(attributes)}",
        models.sequence(models.dense(4), layer, models.dense()),
        data,
        lambda: {
            "optimizer": keras.optimizers.SGD(0.1),
            "loss": "mse",
            # XLA may round another way, which a rounding makes visible.
            "jit_compile": False,
        },
        rows=15,
        batch_size=15,
    )


@pytest.mark.parametrize("make", [None, central], ids=["mirrored", "central"])
@pytest.mark.parametrize("name", CHANGES)
def test_fit(name, make):
    case = case_of(name)
    # Shares of 4, 4, 4 and 3 rows.
    assert_same(train(case, 4, make), plain(case))


def test_weights_of_rows():
    case = case_of("clipped", models.weighted_table)
    assert_same(train(case, 2), plain(case))


def test_the_changes_are_felt():
    """Else they would hide what they are a test of."""
    outcomes = [plain(case_of(name)) for name in CHANGES]
    losses = [outcome["history/loss/1"] for outcome in outcomes]
    assert len(set(np.round(losses, 5))) == len(CHANGES)

"""The private names that gradients rest on are where we look for them."""

import inspect

import keras
import pytest

from gradients.helpers import BACKEND


@pytest.mark.smoke
@pytest.mark.skipif(BACKEND != "jax", reason="The seam is one of JAX alone.")
def test_an_optimizer_that_scales_losses_is_applied_where_we_replace_it():
    owner = keras.optimizers.LossScaleOptimizer
    for name, parameters in (
        ("_common_apply", ["self", "grads", "trainable_variables"]),
        (
            "stateless_apply",
            ["self", "optimizer_variables", "grads", "trainable_variables"],
        ),
    ):
        assert list(inspect.signature(getattr(owner, name)).parameters) == (
            parameters
        )
    optimizer = owner(keras.optimizers.SGD())
    v = keras.Variable(1.0)
    optimizer.build([v])
    assert optimizer._trainable_variables == [v]


@pytest.mark.smoke
def test_layers_collect_losses_where_we_clear_them():
    layer = keras.layers.ActivityRegularization(l2=1.0)
    with keras.StatelessScope(collect_losses=True) as scope:
        layer(keras.ops.ones((2, 2)))
        assert {id(loss) for loss in scope.losses} == layer._loss_ids

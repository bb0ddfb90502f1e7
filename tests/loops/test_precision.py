"""Loops in mixed precision train as on one device, with scaled losses."""

import keras
import numpy as np
from keras import ops

import keras_dist
from loops.helpers import ROWS
from loops.helpers import X
from loops.helpers import Y
from loops.helpers import adam
from loops.helpers import assert_same_numbers
from loops.helpers import batches
from loops.helpers import crossentropy
from loops.helpers import function
from loops.helpers import mlp
from loops.helpers import on_one_device
from loops.helpers import outcome
from loops.helpers import replicas
from loops.helpers import run
from parity.harness import dtype_policy

# The seventh row is more than half precision can hold.
TOO_LARGE = np.where(np.arange(ROWS)[:, None] == 6, np.float32(1e6), X)


def mixed(policy, data, strategy, compiled):
    with dtype_policy(policy), strategy.scope():
        model = mlp(activation="relu")
        optimizer = keras.optimizers.LossScaleOptimizer(
            adam(), initial_scale=64.0, dynamic_growth_steps=2
        )

    @function(compiled)
    def train_step(x, y):
        def loss_fn():
            logits = ops.cast(model(x, training=True), "float32")
            loss = keras_dist.compute_average_loss(crossentropy(y, logits))
            return optimizer.scale_loss(loss), loss

        (_, loss), grads = keras_dist.value_and_grad(
            loss_fn, model.trainable_variables, has_aux=True
        )
        optimizer.apply(grads, model.trainable_variables)
        return loss

    losses = [
        run(strategy, train_step, batch)
        for batch in batches(strategy, data, Y, sizes=(8, 8, 8))
    ]
    assert model.layers[0].compute_dtype == policy.removeprefix("mixed_")
    losses = list(np.nan_to_num(losses, nan=-1.0, posinf=-1.0))
    return outcome(losses=losses, model=model, optimizer=optimizer)


def half(strategy, compiled):
    return mixed("mixed_float16", X, strategy, compiled)


def bfloat(strategy, compiled):
    return mixed("mixed_bfloat16", X, strategy, compiled)


def overflow(strategy, compiled):
    return mixed("mixed_float16", TOO_LARGE, strategy, compiled)


@replicas
def test_half_precision(num_replicas):
    # Gradients of a replica are rounded to 11 bits before they are added up.
    assert_same_numbers(half, num_replicas, total=17.7268, rtol=5e-3)


@replicas
def test_bfloat_precision(num_replicas):
    # To 8 bits.
    assert_same_numbers(bfloat, num_replicas, total=17.727, rtol=4e-2)


@replicas
def test_all_replicas_leave_a_step_out_if_one_overflows(num_replicas):
    assert on_one_device(overflow)["losses/0"] == -1.0
    assert_same_numbers(overflow, num_replicas, total=17.8516, rtol=5e-3)

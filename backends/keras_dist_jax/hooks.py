"""The table of what is replaced in JAX, and in Keras for it, and why.

It is in place as long as that of the front end, `keras_dist/fit/hooks.py`.
"""

from collections.abc import Iterator
from typing import Any

import keras

from keras_dist.plugins import Hook
from keras_dist.plugins import as_hook
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.functions import gradients as control_flow
from keras_dist_jax.sharding.initial_values import make_sharded


def table() -> Iterator[Hook]:
    """Returns the rows, by what they are for."""
    why = "the values of sharded variables are made in parts"
    name = "_initialize_with_initializer"
    yield Hook(keras.Variable, name, _hook_initialization, why)
    why = "`keras.ops.cond` may assign variables in a trace"
    yield Hook(internals.core, "cond", control_flow.hook_cond, why)
    scaling = keras.optimizers.LossScaleOptimizer
    yield Hook(scaling, "_common_apply", control_flow.hook_loss_scaling, why)
    why = "draws without a seed work in a trace"
    name, seeds = "global_seed_generator", internals.seed_generator
    yield Hook(seeds, name, control_flow.hook_global_seed, why)
    why = "a kernel of one TPU is not used by several"
    name = "_can_use_flash_attention"
    yield Hook(internals.nn, name, internals.hook_attention, why)


@as_hook
def _hook_initialization(original: Any, self: Any, initializer: Any) -> None:
    if not make_sharded(self, initializer):
        original(self, initializer)

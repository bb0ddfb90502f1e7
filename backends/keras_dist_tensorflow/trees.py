"""Mutual registration of keras_dist's and TensorFlow's per-replica values."""

from typing import Any

import tensorflow as tf

from keras_dist.core.values import DistributedValues
from keras_dist.core.values import Mirrored
from keras_dist.core.values import PerReplica
from keras_dist.plugin.front_end import StepsOfData
from keras_dist_tensorflow import runtime_internals


def register() -> None:
    """Registers our values as nests of `tf.nest`, and native ones as ours.

    `for` loops over distributed datasets become part of a traced graph.
    """
    DistributedValues.register(tf.distribute.DistributedValues)
    PerReplica.register(tf.types.experimental.distributed.PerReplica)
    kinds: tuple[Any, ...] = (PerReplica, Mirrored)
    for kind in kinds:
        # The protocol of `tf.nest` for classes that are no containers.
        kind.__tf_flatten__ = _flatten
        kind.__tf_unflatten__ = classmethod(_unflatten)
    runtime_internals.register_loop(StepsOfData)


def _flatten(self: Any) -> tuple[None, tuple[Any, ...]]:
    return None, self.values


def _unflatten(cls: Any, _: None, components: Any) -> Any:
    return cls(components)

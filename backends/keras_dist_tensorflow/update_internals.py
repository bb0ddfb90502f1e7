"""The door to private names about updates of variables by optimizers.

| name | why |
|---|---|
| `StrategyExtended._use_merge_call` | an optimizer updates in a meeting, |
| | where replicas have merged already |
| `StrategyExtended._update` | an optimizer may have variables of no |
| | strategy, with one copy only |
| `LossScaleOptimizer._tf_apply`, | the former refuses cross-replica context; |
| `._common_apply` | the latter does the same and allows it |

`tests/backends/tensorflow/test_internals.py` fails readably when one moves.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf


class _Current(threading.local):
    is_applying = False


_current = _Current()


def install_applying(native: tf.distribute.Strategy) -> None:
    """Prepares a native strategy for updates inside of `applying`.

    Variables outside any strategy are updated on their own device.
    """
    extended = native.extended
    use_merge_call = extended._use_merge_call
    update, colocate = extended._update, extended.colocate_vars_with

    def _use_merge_call() -> bool:
        return not _current.is_applying and use_merge_call()

    def _update(var: Any, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        if is_distributed(var):
            return update(var, fn, args, kwargs, group)
        with tf.device(var.device):  # its only copy
            return fn(var, *args, **kwargs)

    def colocate_vars_with(variable: Any) -> Any:
        if is_distributed(variable):
            return colocate(variable)
        return contextlib.nullcontext()

    extended._use_merge_call = _use_merge_call
    extended._update = _update
    extended.colocate_vars_with = colocate_vars_with


def is_distributed(native: Any) -> bool:
    """Returns whether a `tf.Variable` has a copy for each native replica."""
    return isinstance(native, tf.distribute.DistributedValues)


@contextlib.contextmanager
def applying(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Makes `optimizer.apply` legal in cross-replica context."""
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scales:
        # `object.__setattr__`: Keras' own would track the attribute.
        object.__setattr__(optimizer, "_tf_apply", optimizer._common_apply)
    _current.is_applying = True
    try:
        yield
    finally:
        _current.is_applying = False
        if scales:
            object.__delattr__(optimizer, "_tf_apply")

"""print: prints values from compiled and from plain functions."""

from typing import Any

import keras
from keras import ops

from keras_dist.core.regroup import map_nest
from keras_dist.plugin.backend import get_backend
from keras_dist.replica.replica_context import get_replica_context


def print(*values: Any, sep: str = " ", end: str = "\n") -> None:
    """Prints values; in a compiled function, each time it runs.

    Python's own `print` runs when a function is traced, and shows tensors
    without values. With several replicas, the output of each begins with
    `replica 0: ` and so on. The order between replicas, and on JAX between
    prints, is not defined.

    Args:
        *values: Tensors, variables, or anything that Python prints, also in
            lists, tuples and dicts.
        sep: String between the values.
        end: String after the last value.

    Example:

    >>> keras_dist.print("loss", 0.5, end=".\\n")
    loss 0.5.
    """
    context = get_replica_context()
    replica = None
    if context is not None and context.num_replicas_in_sync > 1:
        replica = context.replica_id_in_sync_group
    shown = [map_nest(_value, value) for value in values]
    get_backend().print(shown, sep, end, replica)


def _value(leaf: Any) -> Any:
    # The value without the framework's variable object and its gradients.
    if isinstance(leaf, keras.Variable):
        return ops.stop_gradient(leaf.value)
    return leaf

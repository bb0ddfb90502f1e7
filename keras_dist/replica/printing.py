"""print: shows values when compiled code runs."""

from typing import Any

import keras
from keras import ops

from keras_dist.core.regroup import map_nest
from keras_dist.plugin.backend import get_backend
from keras_dist.replica.replica_context import get_replica_context


def print(*values: Any, sep: str = " ", end: str = "\n") -> None:
    """Prints values, inside of compiled functions each time they run.

    Python's own `print` runs when a function is traced, and shows tensors
    without values. In replica functions of several replicas, what each prints
    begins with `replica 0: ` and so on. The order between replicas, and on
    JAX between prints, is not defined.

    Args:
        *values: Tensors, variables, or anything that Python prints, also in
            lists, tuples and dicts.
        sep: String between the values.
        end: String after the last one.

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
    # Of a variable, just what it holds, and not what it is to the framework.
    if isinstance(leaf, keras.Variable):
        return ops.stop_gradient(leaf.value)
    return leaf

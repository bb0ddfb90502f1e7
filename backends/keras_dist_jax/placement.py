"""Variables, put where a layout wants them."""

from typing import Any

import jax
import keras

from keras_dist_jax import arrays
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.layout import Layout


def place(variable: keras.Variable, layout: Layout) -> None:
    """Moves a variable's value to a layout, unless it lies there already.

    The array it had before stays usable for whoever else holds it.
    """
    holder = [internals.array_of(variable)]
    if holder[0] is None or layout.holds(holder[0]):
        return
    if isinstance(holder[0], jax.core.Tracer):
        return
    if isinstance(holder[0], jax.Array) and arrays.is_shared(holder):
        # The first device would use the buffer it has, and a step delete it.
        holder[0] = arrays.copy_of(holder[0])
    internals.set_array(variable, layout.place(holder[0]))


def shard_on(array: Any, device: Any) -> Any:
    """What an array has on one device; copied there if that is nothing."""
    if isinstance(array, jax.core.Tracer):
        return array
    if array.is_fully_replicated:
        for shard in array.addressable_shards:
            if shard.device == device:
                return shard.data
    return jax.device_put(array, device)

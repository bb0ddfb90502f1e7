"""Moves of variables to where a layout needs them."""

from typing import Any

import jax
import keras

from keras_dist_jax import arrays
from keras_dist_jax import keras_internals as internals
from keras_dist_jax import shards
from keras_dist_jax.layout import Layout

# Set on variables whose memory a replica function may have kept.
LENT = "_keras_dist_lent"


def place(variable: keras.Variable, layout: Layout) -> None:
    """Moves a variable's value to a layout, unless it lies there already.

    The array from before stays usable for all other holders.
    """
    if shards.is_sharded(variable):
        return
    holder = [internals.array_of(variable)]
    if holder[0] is None or layout.holds(holder[0]):
        return
    if isinstance(holder[0], jax.core.Tracer):
        return
    if isinstance(holder[0], jax.Array) and arrays.is_shared(holder):
        # The first device would share this buffer, and a step delete it.
        holder[0] = arrays.copy_of(holder[0])
    internals.set_array(variable, layout.place(holder[0]))


def shard_on(array: Any, device: Any) -> Any:
    """Returns an array's shard on a device, or copies the array there."""
    if isinstance(array, jax.core.Tracer):
        return array
    # A shard would be another object, whose holders no variable counts.
    if array.devices() == {device}:
        return array
    if array.is_fully_replicated:
        for shard in array.addressable_shards:
            if shard.device == device:
                return shard.data
    return jax.device_put(array, device)


def own_shard_on(array: Any, device: Any) -> Any:
    """Returns an array on a device, for a holder that may keep it.

    A variable may have the array on several devices, and a program delete it.
    """
    shard = shard_on(array, device)
    if isinstance(array, jax.core.Tracer) or len(array.devices()) == 1:
        return shard
    return arrays.copy_of(shard)


def lend(variable: keras.Variable, device: Any) -> Any:
    """Returns a variable's value on one device, for a holder that may keep it.

    It may share the variable's memory. Then `take` copies the variable.
    """
    array = internals.array_of(variable)
    # From another device, `shard_on` copies.
    if not shards.is_sharded(variable) and device in array.devices():
        vars(variable)[LENT] = True
    return shard_on(array, device)


def take(variable: keras.Variable, layout: Layout) -> Any:
    """Returns a variable's array on its layout, in memory that was not lent."""
    if shards.is_sharded(variable):
        return shards.stored(variable)
    place(variable, layout)
    if vars(variable).pop(LENT, False):
        array = arrays.copy_of(internals.array_of(variable))
        internals.set_array(variable, array)
    return variable.value


def give_back(variable: keras.Variable, array: Any) -> None:
    """Undoes `keras_internals.take_away`, with an array as of `take`."""
    if shards.is_sharded(variable):
        shards.give_back(variable, array)
    else:
        internals.give_back(variable, array)

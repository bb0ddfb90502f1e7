"""Copies, reference counts and liveness checks of state arrays."""

import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from keras_dist_jax.machine import is_described
from keras_dist_jax.programs.jaxprs import AXIS

# Computes at once while it is open, although a function is traced.
eagerly = jax.ensure_compile_time_eval
COUNT = sys.getrefcount
# A copy may take this part of what a device has left.
_ROOM = 4
# The reference count of an object that only a list holds, by `map`.
ALONE = next(map(COUNT, [object()]))


def have_room(arrays: Sequence[Any]) -> bool:
    """Tells whether the devices have memory for a copy of arrays, too."""
    sizes: dict[Any, int] = {}
    for array in arrays:
        for shard in [] if is_described(array) else array.addressable_shards:
            sizes[shard.device] = sizes.get(shard.device, 0) + shard.data.nbytes
    for device, size in sizes.items():
        known = device.memory_stats() or {}
        limit = known.get("bytes_limit")
        # As much as the program needs is not known.
        if limit and limit - known["bytes_in_use"] < _ROOM * size:
            return False
    return True


def copy_shared(
    arrays: list[Any], num_own: int = 0, copy_all: bool = False
) -> None:
    """Replaces, in place, each array with other references by a copy.

    A step deletes its inputs, which a user may have read from a variable.
    `num_own` is the number of references that variables and slots may have.
    """
    for index, count in enumerate(list(map(COUNT, arrays))):
        if copy_all or count > ALONE + num_own:
            arrays[index] = copy_of(arrays[index])


def copy_of(array: jax.Array) -> Any:
    """Copies an array into new buffers; a committed one stays so."""
    if is_described(array):
        return array
    if not array.committed:
        return array.copy()
    return jax.device_put(array, array.sharding, may_alias=False)


def is_shared(holder: list[Any]) -> bool:
    """Tells whether more than a variable and this list hold an array."""
    return next(map(COUNT, holder)) > ALONE + 1


def to_host(arrays: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
    """Copies arrays to host memory; of sharded ones only this worker's part."""
    if any(map(is_described, arrays)):
        return list(arrays)
    # Objects of their own: the state's would keep what they were copied to.
    shards = [
        array.addressable_data(0) if array.is_fully_replicated else None
        for array in arrays
    ]
    away = [s for s in shards if s is not None and not _is_on_host(s)]
    for shard in away:
        shard.copy_to_host_async()
    return [
        own_shard(array)
        if shard is None
        # A buffer with a view on it can't be reused by the next step.
        else np.array(shard, copy=True if _is_on_host(shard) else None)
        for array, shard in zip(arrays, shards, strict=True)
    ]


def _is_on_host(array: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in array.devices())


def bytes_here(array: jax.Array) -> int:
    """Returns the bytes that `to_host` would copy of an array."""
    if is_described(array) or array.is_fully_replicated:
        size: int = math.prod(array.shape) * array.dtype.itemsize
        return size
    places = {str(s.index): s.data.nbytes for s in array.addressable_shards}
    return sum(places.values())


def axis_of(array: jax.Array) -> int | None:
    """Returns the axis that replicas divide; `None` if each has the others."""
    axes = enumerate(array.sharding.spec)
    return next((axis for axis, names in axes if AXIS in (names or ())), None)


def own_shard(array: jax.Array) -> np.ndarray[Any, Any]:
    """Copies the part on this worker's devices to host memory."""
    shards = {
        tuple(place.start or 0 for place in shard.index): shard.data
        for shard in array.addressable_shards
    }
    starts = np.array([*shards])
    first, last = starts.min(0), starts.max(0)
    size = next(iter(shards.values())).shape
    part = np.empty(last - first + size, array.dtype)
    for start, data in zip(starts - first, shards.values(), strict=True):
        place = zip(start, start + size, strict=True)
        part[tuple(slice(*ends) for ends in place)] = np.asarray(data)
    return part


def failure_of(arrays: Sequence[Any]) -> BaseException | None:
    """Waits for arrays; returns the error of one that failed, or `None`."""
    try:
        jax.block_until_ready(list(arrays))
    except Exception as error:  # the framework raises several kinds
        return error
    return None

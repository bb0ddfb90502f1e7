"""What the state's arrays have to be asked: who holds them, do they live."""

import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


def _references(objects: Sequence[Any]) -> list[int]:
    return [sys.getrefcount(obj) for obj in objects]


# What an object counts that nothing but a list of ours holds.
_ALONE = _references([object()])[0]


def copy_shared(arrays: list[Any]) -> None:
    """Replaces, in place, each array that somebody else holds too by a copy.

    A step deletes its inputs. Arrays that a user read from a variable, or
    assigned to one, must outlive that; all others need no second buffer.

    Args:
        arrays: List of `jax.Array`s; no variable holds them any more.
    """
    for index, count in enumerate(_references(arrays)):
        if count > _ALONE:
            arrays[index] = copy_of(arrays[index])


def copy_of(array: Any) -> Any:
    """The same values in buffers of their own.

    An array that JAX may still move stays one.
    """
    if not array.committed:
        return array.copy()
    return jax.device_put(array, array.sharding, may_alias=False)


def is_shared(holder: list[Any]) -> bool:
    """Whether more than a variable and this list of one hold an array."""
    return _references(holder)[0] > _ALONE + 1


def to_host(arrays: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
    """Copies of the arrays in host memory.

    Copies and not views: a buffer with a view on it can't be reused by the
    step that gets it.
    """
    for array in arrays:
        array.copy_to_host_async()
    return [
        np.array(array, copy=True)
        if array.is_fully_replicated
        else own_rows(array)
        for array in arrays
    ]


def own_rows(array: Any) -> np.ndarray[Any, Any]:
    """A copy of the rows that lie on this worker's devices."""
    shards = sorted(
        array.addressable_shards, key=lambda shard: shard.index[0].start or 0
    )
    return np.concatenate([np.asarray(shard.data) for shard in shards])


def failure_of(arrays: Sequence[Any]) -> BaseException | None:
    """Waits for the arrays; why one of them has no value, or `None`.

    The step that should have made an array may have failed on the device,
    which shows only when it is waited for; or a step took it and gave nothing
    back.
    """
    try:
        jax.block_until_ready(list(arrays))
    except Exception as error:  # the framework raises several kinds
        return error
    return None

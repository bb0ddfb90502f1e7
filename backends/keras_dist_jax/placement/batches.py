"""Batches of any length, split into equal shares of rows."""

from collections.abc import Sequence
from typing import Any
from typing import Protocol

import jax
import keras
import numpy as np
from jax.experimental.sparse import JAXSparse

from keras_dist.plugins import OwnRows
from keras_dist.plugins import UnequalLengths
from keras_dist_jax.jax_internals import from_shards
from keras_dist_jax.machine import described
from keras_dist_jax.machine import is_described


def rows_to_cut(leaves: Sequence[Any], parts: int) -> int | None:
    """Returns the rows to split over devices, or `None` to give each all."""
    # A batch with fewer rows than devices is not worth a collective a layer.
    rows = None
    for leaf in leaves:
        shape = getattr(leaf, "shape", None)
        if not shape or (rows is not None and shape[0] != rows):
            return None
        rows = int(shape[0])
    return None if rows is None or rows < parts else rows


def tell_if_unequal(data: object, unequal: UnequalLengths) -> None:
    """Reports arrays of different lengths: such a batch is not split."""
    leaves = jax.tree.leaves(data, is_leaf=_is_sparse)
    if any(map(_is_sparse, leaves)):
        unequal.tell_of_sparse()
        return
    shapes = [getattr(leaf, "shape", None) for leaf in leaves]
    lengths = [shape[0] for shape in shapes if shape]
    if len(set(lengths)) > 1:
        unequal.tell(lengths, on_each=True)


def _is_sparse(leaf: object) -> bool:
    return isinstance(leaf, JAXSparse)


def share_of(rows: int, parts: int) -> int:
    """Returns the rows of a full share; the last shares may have fewer."""
    return -(-rows // parts)


def shares(batch: object, parts: int) -> list[range]:
    """Returns the range of a batch's rows on each of `parts` devices."""
    leaves = jax.tree.leaves(batch)
    rows = rows_to_cut(leaves, parts)
    if rows is None:
        longest = max(leaf.shape[0] for leaf in leaves if leaf.shape)
        return [range(longest)] * parts
    share = share_of(rows, parts)
    return [
        range(rows)[index * share : (index + 1) * share]
        for index in range(parts)
    ]


class ShardsBatches(Protocol):
    """The part of a `Layout` that says how batches are sharded."""

    sharded: Any
    first: int
    num_replicas: int
    devices: tuple[Any, ...]
    holders: tuple[Any, ...]

    def spread(self, values: Sequence[Any]) -> list[Any]:
        """Repeats each replica's value for each of its devices."""


def put_sharded(leaf: object, layout: ShardsBatches) -> Any:
    """Puts this worker's shares of an array's rows on its devices."""
    # Rows are padded with zeros to a multiple of the number of all workers'
    # replicas.
    sharding, first, parts = layout.sharded, layout.first, layout.num_replicas
    array = as_array(leaf)
    share = share_of(array.shape[0], parts)
    shape = (share * parts, *array.shape[1:])
    if is_described(array):
        return jax.ShapeDtypeStruct(shape, array.dtype, sharding=sharding)
    # With several workers, JAX would compare the values by a collective.
    if isinstance(array, jax.Array) and sharding.is_fully_addressable:
        return jax.device_put(_padded(array, share * parts), sharding)
    last = first + len(layout.devices)
    starts = range(first * share, last * share, share)
    shares = [array[start : start + share] for start in starts]
    if array.shape[0] % parts:
        shares = [_padded(part, share) for part in shares]
    aval = jax.core.ShapedArray(shape, array.dtype)
    return from_shards(aval, sharding, layout.spread(shares), layout.holders)


def put_whole(leaf: Any, sharding: Any, devices: Sequence[Any]) -> Any:
    """Puts a copy of an array on each of this worker's devices."""
    array = as_array(leaf)
    if is_described(array):
        return described(array, sharding)
    if isinstance(array, jax.Array) and sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    aval = jax.core.ShapedArray(array.shape, array.dtype)
    return from_shards(aval, sharding, [array] * len(devices), devices)


def _padded(array: jax.Array, rows: int) -> Any:
    missing = rows - array.shape[0]
    if not missing:
        return array
    zeros = np.zeros((missing, *array.shape[1:]), array.dtype)
    return np.concatenate([np.asarray(array), zeros])


def unpad(data: object, rows: int, sharding: object) -> Any:
    """Removes the padding rows of a batch inside of a trace."""
    # The step sees the true shapes, so nothing needs a mask. The constraint
    # keeps the rows where they are, in shares that are not quite equal.
    return jax.tree.map(
        lambda x: jax.lax.with_sharding_constraint(x[:rows], sharding), data
    )


def as_array(leaf: object) -> Any:
    """Converts a leaf to a NumPy array of a dtype that JAX has."""
    if type(leaf) is not np.ndarray:
        if is_described(leaf):
            return leaf
        if isinstance(leaf, OwnRows):
            return leaf.map(as_array)
        if isinstance(leaf, jax.Array):
            # Random keys have no NumPy dtype.
            is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)
            if is_key or any(d.platform != "cpu" for d in leaf.devices()):
                return leaf
        elif not isinstance(leaf, np.ndarray):
            leaf = keras.ops.convert_to_numpy(leaf)
        leaf = np.asarray(leaf)
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    return leaf if leaf.dtype == dtype else leaf.astype(dtype)

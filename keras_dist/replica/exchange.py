"""Exchanges replicas' values with those of other workers."""

from typing import Any

import keras
from keras import ops

from keras_dist.core.rows import Share
from keras_dist.internals import keras_internals
from keras_dist.plugin.replica import Group
from keras_dist.replica.join import Combine
from keras_dist.replica.join import RowCount
from keras_dist.replica.join import join_leaves

# The leaves of the nest of a replica, or of a whole worker, and its rows.
Entry = tuple[list[Any], Share]


def with_other_workers(
    group: Group, own: list[Entry], combine: Combine, alike: bool = False
) -> list[Entry]:
    """Returns the entries of this worker's replicas and of other workers.

    The values of each other worker's replicas are joined in one entry. With
    `alike`, so are those of this worker's replicas, so that results computed
    from the entries are the same everywhere to the last digit. `combine` joins
    values without rows, given values and shares.

    Returns:
        List of entries, in replica order.
    """
    workers = group.workers
    if workers is None:
        return own
    index = workers.cluster.index
    leaves = join_leaves(
        [leaves for leaves, _ in own],
        [_within(share, group.shares[index]) for _, share in own],
        combine,
    )
    leaves = [x.rows if isinstance(x, RowCount) else x for x in leaves]
    masks = [keras_internals.get_mask(leaf) for leaf in leaves]
    sent = [leaf for leaf in [*leaves, *masks] if _travels(leaf)]
    arrived = workers.gather_rows([_packed(x) for x in sent], group.shares)
    entries: list[Entry] = []
    for worker, tensors in enumerate(arrived):
        if worker == index and not alike:
            entries += own
            continue
        values = iter(zip(sent, tensors, strict=True))
        both = [
            _unpacked(*next(values)) if _travels(leaf) else leaf
            for leaf in [*leaves, *masks]
        ]
        entries.append((_as_own(own[0][0], both), group.shares[worker]))
    return entries


def _as_own(like: list[Any], both: list[Any]) -> list[Any]:
    """Returns leaves in the form of a replica's own, given leaves and masks."""
    leaves, masks = both[: len(like)], both[len(like) :]
    for leaf, mask in zip(leaves, masks, strict=True):
        if mask is not None:
            keras_internals.set_mask(leaf, mask)
    return [
        RowCount(leaf) if isinstance(own, RowCount) else leaf
        for own, leaf in zip(like, leaves, strict=True)
    ]


def _within(share: Share, worker: Share) -> Share:
    """Returns a replica's share of its worker's rows."""
    if isinstance(worker.rows, int):
        return Share(share.rows, max(worker.rows, 1))
    return Share(share.rows, ops.maximum(worker.rows, 1))


def _travels(leaf: Any) -> bool:
    if isinstance(leaf, (bool, str)) or leaf is None:
        return False
    return isinstance(leaf, (int, float)) or hasattr(leaf, "shape")


def _is_bool(value: Any) -> bool:
    return bool(keras.backend.standardize_dtype(value.dtype) == "bool")


def _packed(leaf: Any) -> Any:
    tensor = ops.convert_to_tensor(leaf)
    return ops.cast(tensor, "uint8") if _is_bool(tensor) else tensor


def _unpacked(sent: Any, arrived: Any) -> Any:
    if hasattr(sent, "dtype") and _is_bool(sent):
        return ops.cast(arrived, "bool")
    return arrived

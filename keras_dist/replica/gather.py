"""Gathering the rows of all replicas on each of them."""

from collections.abc import Sequence
from typing import Any

import keras

from keras_dist.core import nests
from keras_dist.core.rows import Share
from keras_dist.core.rows import scaled_gradient
from keras_dist.internals import keras_internals
from keras_dist.replica.exchange import Entry
from keras_dist.replica.join import detached
from keras_dist.replica.join import is_float
from keras_dist.replica.join import is_row_shaped
from keras_dist.replica.join import join_leaves
from keras_dist.replica.join import mean_over_rows
from keras_dist.replica.state import ReplicaStep


def gathered(step: ReplicaStep, what: str, value: Any) -> Any:
    """A nested value as one device would have it, with all rows.

    Gradients flow to this replica's own rows only. They are as large as the
    weight of the replica makes small: what else is computed with the value,
    with variables for instance, counts once.

    Args:
        step: The `ReplicaStep` of this replica, which meets the others.
        what: String that names the meeting in errors.
        value: Nested structure of tensors, arrays and other things. What has
            no rows stays this replica's own.
    """
    leaves = nests.flatten(value)
    known = [(id(leaf), _may_have_rows(leaf, step.share)) for leaf in leaves]

    def exchange(
        everyone: list[tuple[Entry, list[tuple[int, bool]]]],
    ) -> tuple[list[Entry], list[int]]:
        entries, known = zip(*everyone, strict=True)
        places = [
            place
            for place, each in enumerate(zip(*known, strict=True))
            if _is_rows(each)
        ]
        own = [([rows[i] for i in places], share) for rows, share in entries]
        return step.exchange(own), places

    entries, places = step.replica.meet(
        what, exchange, ((detached(leaves), step.share), known)
    )
    shares = [share for _, share in entries]
    everyone = [rows for rows, _ in entries]
    everyone[[share is step.share for share in shares].index(True)] = [
        _counted(leaves[place], step.share) for place in places
    ]
    merged = join_leaves(everyone, shares, mean_over_rows)
    for place, rows in zip(places, merged, strict=True):
        leaves[place] = rows
    return nests.pack(value, leaves)


def _is_rows(each: Sequence[tuple[int, bool]]) -> bool:
    """Whether replicas, each with the id of its leaf, have rows of a batch."""
    ids = {key for key, _ in each}
    # A constant is the very same object to all of them.
    is_constant = len(each) > 1 and len(ids) == 1
    return not is_constant and all(may_be for _, may_be in each)


def _may_have_rows(leaf: Any, share: Share) -> bool:
    """Whether axis 0 may be that of rows, or of several values a row."""
    if isinstance(leaf, keras.Variable) or not is_row_shaped(leaf):
        return False
    size, rows = leaf.shape[0], share.rows
    if size is None or not isinstance(rows, int):
        return size is None
    return bool(size % max(rows, 1) == 0)


def _counted(leaf: Any, share: Share) -> Any:
    if not is_float(leaf) or not keras.ops.is_tensor(leaf):
        return leaf
    mask = keras_internals.get_mask(leaf)
    leaf = scaled_gradient(leaf, share.inverse)
    if mask is not None:
        keras_internals.set_mask(leaf, mask)
    return leaf

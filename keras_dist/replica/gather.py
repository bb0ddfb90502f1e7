"""Gathers the rows of all replicas on each of them."""

from collections.abc import Sequence
from typing import Any

import keras

from keras_dist.core import nests
from keras_dist.core.rows import Share
from keras_dist.core.rows import scaled_gradient
from keras_dist.internals import keras_internals
from keras_dist.replica.exchange import Entry
from keras_dist.replica.exchange import detached
from keras_dist.replica.exchange import is_float
from keras_dist.replica.exchange import is_row_shaped
from keras_dist.replica.exchange import join_leaves
from keras_dist.replica.exchange import mean_over_rows
from keras_dist.replica.state import ReplicaStep


def gathered(step: ReplicaStep, what: str, value: Any) -> Any:
    """Returns a nested value with the rows of all replicas.

    Gradients flow to this replica's own rows only. They are divided by the
    replica's weight, because they are multiplied by it when replicas' gradients
    are summed. So other gradients of what is computed, such as those of
    variables, count once in all.

    Leaves without rows stay this replica's own. `what` names the meeting in
    errors.
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
    """Returns whether a leaf has rows, given each replica's id and guess."""
    ids = {key for key, _ in each}
    # A constant is the same object on all replicas.
    is_constant = len(each) > 1 and len(ids) == 1
    return not is_constant and all(may_be for _, may_be in each)


def _may_have_rows(leaf: Any, share: Share) -> bool:
    """Returns whether axis 0 may have one or several values for each row."""
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

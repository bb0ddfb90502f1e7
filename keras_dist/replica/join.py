"""Joining what the replicas have into what one device would have had."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_dist.core import nests
from keras_dist.core.rows import Share
from keras_dist.core.rows import scaled
from keras_dist.internals import keras_internals

Combine = Callable[[list[Any], list[Share]], Any]


def detached(value: Any) -> list[Any]:
    """The leaves of a nested value, without gradients."""
    return [_detached(leaf) for leaf in nests.flatten(value)]


def join(
    like: Any, everyone: list[tuple[list[Any], Share]], combine: Combine
) -> Any:
    """What one device would have had: rows joined, scalars combined.

    Args:
        like: Nested value with the structure of the result.
        everyone: For each replica, the leaves of its value, and its share.
        combine: Callable for values without rows, given the replicas' values
            and shares.

    Returns:
        Nested structure like `like`.
    """
    values = [leaves for leaves, _ in everyone]
    shares = [share for _, share in everyone]
    return nests.pack(like, join_leaves(values, shares, combine))


def join_leaves(
    values: Sequence[Sequence[Any]],
    shares: Sequence[Share],
    combine: Combine,
) -> list[Any]:
    """`join`, of nests that are flat already."""
    return [
        _join_leaf(list(parts), list(shares), combine)
        for parts in zip(*values, strict=True)
    ]


class RowCount:
    """A weight that says how many rows a value is of, as Keras' trainer
    gives to its running loss: replicas' weights add up."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows


def mean_or_count(values: list[Any], shares: list[Share]) -> Any:
    """`mean_over_rows`; of `RowCount`s, their sum."""
    if isinstance(values[0], RowCount):
        return sum_over_replicas([value.rows for value in values], shares)
    return mean_over_rows(values, shares)


def mean_over_rows(values: list[Any], shares: list[Share]) -> Any:
    """Mean of the replicas' values, each counting as its rows do.

    Where all are equal it is just that value, to the last digit. What is not
    a float is the first replica's.
    """
    first = values[0]
    if not is_float(first) or all(value is first for value in values):
        return first
    # On the device that the meeting is on.
    first = ops.convert_to_tensor(first)
    equal, total = True, scaled(shares[0].keep(first), shares[0].weight)
    for value, share in zip(values[1:], shares[1:], strict=True):
        value = ops.convert_to_tensor(value, dtype=first.dtype)
        equal = ops.logical_and(equal, value == first)
        total = total + scaled(share.keep(value), share.weight)
    return ops.where(equal, first, total)


def sum_over_rows(values: list[Any], shares: list[Share]) -> Any:
    """What some replicas add to the mean over all rows: a float tensor."""
    terms = []
    for value, share in zip(values, shares, strict=True):
        tensor = ops.convert_to_tensor(value)
        terms.append(scaled(share.keep(tensor), share.weight))
    return sum(terms[1:], terms[0])


def sum_over_replicas(values: list[Any], shares: list[Share]) -> Any:
    """Sum of the replicas' counts, leaving out replicas without rows."""
    terms = [s.keep(value) for value, s in zip(values, shares, strict=True)]
    return sum(terms[1:], terms[0])


def _detached(value: Any) -> Any:
    if not keras.ops.is_tensor(value):
        return value
    mask = keras_internals.get_mask(value)
    value = ops.stop_gradient(value)
    if mask is not None:
        keras_internals.set_mask(value, mask)
    return value


def _join_leaf(parts: list[Any], shares: list[Share], combine: Combine) -> Any:
    first = parts[0]
    if is_row_shaped(first):
        masks = [keras_internals.get_mask(part) for part in parts]
        merged = concat_rows(parts, shares)
        if masks[0] is not None:
            keras_internals.set_mask(merged, concat_rows(masks, shares))
        return merged
    if first is None or isinstance(first, (str, bool)):
        return first
    return combine(parts, shares)


def is_float(value: Any) -> bool:
    """Whether a value is a float number, or a tensor of them."""
    if isinstance(value, (int, float)):
        return isinstance(value, float)
    dtype = getattr(value, "dtype", None)
    return dtype is not None and keras.backend.is_float_dtype(
        keras.backend.standardize_dtype(dtype)
    )


def is_row_shaped(value: Any) -> bool:
    """Whether a value is an array with rows along axis 0."""
    return len(getattr(value, "shape", ())) > 0


def concat_rows(parts: list[Any], shares: list[Share]) -> Any:
    """Joins the replicas' rows in order, leaving out those without any."""
    kept = [
        share.trim(part)
        for part, share in zip(parts, shares, strict=True)
        if not (isinstance(share.rows, int) and share.rows == 0)
    ]
    if not kept:
        return parts[0][:0]
    return kept[0] if len(kept) == 1 else ops.concatenate(kept, axis=0)

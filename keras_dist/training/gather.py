"""Gathering what each replica passes to a metric or a loss."""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops
from keras import tree

from keras_dist.training import keras_internals
from keras_dist.training.shares import Share
from keras_dist.training.shares import scaled
from keras_dist.training.step import ReplicaStep
from keras_dist.training.step import concat_rows
from keras_dist.training.step import is_row_shaped

Everyone = list[tuple[Any, Share]]


def exchange(step: ReplicaStep, what: str, value: Any) -> Everyone:
    """Every replica's nested `value` and share, without gradients."""
    detached = tree.map_structure(_detached, value)
    return step.exchange(what, (detached, step.share))


def merge(
    everyone: Everyone,
    scalar: Callable[[list[Any], list[Share]], Any] | None = None,
    own: tuple[int, Any] | None = None,
) -> Any:
    """What one device would have passed: rows joined, scalars combined.

    Args:
        everyone: From `exchange`.
        scalar: Callable that combines rank-0 values. Defaults to their mean
            over rows.
        own: Optional pair of a position and a nested value that takes the
            place of the detached one there, so that gradients flow to it.

    Returns:
        Nested structure like each replica's.
    """
    values = [value for value, _ in everyone]
    shares = [share for _, share in everyone]
    if own is not None:
        position, value = own
        values[position] = value
    flat = zip(*(tree.flatten(value) for value in values), strict=True)
    merged = [_merge_leaf(list(parts), shares, scalar) for parts in flat]
    return tree.pack_sequence_as(values[0], merged)


def mean_over_rows(values: list[Any], shares: list[Share]) -> Any:
    """Mean of the replicas' scalars, each counting as its rows do."""
    if all(value is values[0] for value in values) or all(
        isinstance(value, (bool, int, float)) and value == values[0]
        for value in values
    ):
        return values[0]
    if not _is_float(values[0]):
        return values[0]
    terms = [
        scaled(share.keep(value), share.weight)
        for value, share in zip(values, shares, strict=True)
    ]
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


def _merge_leaf(
    parts: list[Any],
    shares: list[Share],
    scalar: Callable[[list[Any], list[Share]], Any] | None,
) -> Any:
    first = parts[0]
    if is_row_shaped(first):
        masks = [keras_internals.get_mask(part) for part in parts]
        merged = concat_rows(parts, shares)
        if masks[0] is not None:
            keras_internals.set_mask(merged, concat_rows(masks, shares))
        return merged
    if first is None or isinstance(first, (str, bool)):
        return first
    return (scalar or mean_over_rows)(parts, shares)


def _is_float(value: Any) -> bool:
    if isinstance(value, (int, float)):
        return isinstance(value, float)
    dtype = getattr(value, "dtype", None)
    return dtype is not None and keras.backend.is_float_dtype(
        keras.backend.standardize_dtype(dtype)
    )

"""Gathering what each replica passes to a metric or a loss."""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_dist.training import keras_internals
from keras_dist.training import nests
from keras_dist.training.shares import Share
from keras_dist.training.shares import scaled
from keras_dist.training.step import ReplicaStep
from keras_dist.training.step import concat_rows
from keras_dist.training.step import is_row_shaped

Combine = Callable[[list[Any], list[Share]], Any]


class Gathered:
    """A nested value of each replica, and how to join them.

    Args:
        step: The `ReplicaStep` of this replica, which meets the others.
        what: String that names the meeting in errors.
        value: Nested structure of tensors, arrays and other things.
    """

    def __init__(self, step: ReplicaStep, what: str, value: Any) -> None:
        self._own = value
        self._own_share = step.share
        flat = [_detached(leaf) for leaf in nests.flatten(value)]
        everyone = step.exchange(what, (flat, step.share))
        self._values = [values for values, _ in everyone]
        self._shares = [share for _, share in everyone]

    def merge(
        self, combine: Combine | None = None, with_gradients: bool = False
    ) -> Any:
        """What one device would have had: rows joined, scalars combined.

        Args:
            combine: Callable for values without rows, given the replicas'
                values and shares. Defaults to `mean_over_rows`.
            with_gradients: Boolean, whether gradients flow to this replica's
                own rows.

        Returns:
            Nested structure like each replica's.
        """
        values = list(self._values)
        if with_gradients:
            position = [s is self._own_share for s in self._shares].index(True)
            values[position] = nests.flatten(self._own)
        merged = [
            _merge_leaf(list(parts), self._shares, combine or mean_over_rows)
            for parts in zip(*values, strict=True)
        ]
        return nests.pack(self._own, merged)


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
    combine: Combine,
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
    return combine(parts, shares)


def _is_float(value: Any) -> bool:
    if isinstance(value, (int, float)):
        return isinstance(value, float)
    dtype = getattr(value, "dtype", None)
    return dtype is not None and keras.backend.is_float_dtype(
        keras.backend.standardize_dtype(dtype)
    )

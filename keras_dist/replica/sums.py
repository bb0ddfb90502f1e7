"""Tells sums over rows from means, by the values of both halves of the rows."""

import enum
from typing import Any

import numpy as np


class Kind(enum.Enum):
    """The relation of a value of all rows to the values of both halves."""

    SUM = "their sum"
    MEAN = "their mean"
    CONSTANT = "the same"
    COUPLED = "neither their sum nor their mean"
    UNKNOWN = "not to be told"


def clearer(one: Kind, other: Kind) -> Kind:
    """Returns the kind that says more; `COUPLED` if clear kinds differ."""
    vague = (Kind.UNKNOWN, Kind.CONSTANT)
    if one in vague:
        return one if other is Kind.UNKNOWN else other
    if other in vague or one is other:
        return one
    return Kind.COUPLED


def kind_of(
    whole: Any,
    first: Any,
    second: Any,
    is_noisy: bool = False,
    tolerance: float = 2e-3,
) -> Kind:
    """Returns the kind of a value of all rows, given those of both halves.

    `is_noisy` says that the values are random. `tolerance` is the largest
    difference that counts as rounding, relative to the largest number.
    """
    arrays = [np.asarray(x, "float64") for x in (whole, first, second)]
    if any(not np.all(np.isfinite(x)) for x in arrays):
        return Kind.UNKNOWN
    whole, first, second = arrays
    if not whole.shape == first.shape == second.shape:
        return Kind.COUPLED
    mean = (first + second) / 2
    size = float(np.max(np.abs([whole, first, second]), initial=0.0))
    if not size:
        return Kind.UNKNOWN
    if is_noisy:
        return _nearest(whole, mean)

    def near(one: Any, other: Any) -> bool:
        return bool(np.max(np.abs(one - other)) <= tolerance * size)

    if near(first, second) and near(whole, first):
        return Kind.CONSTANT
    is_mean, is_sum = near(whole, mean), near(whole, 2 * mean)
    if is_mean and is_sum:
        return Kind.UNKNOWN
    if is_mean:
        return Kind.MEAN
    return Kind.SUM if is_sum else Kind.COUPLED


def _nearest(whole: Any, mean: Any) -> Kind:
    square = float(np.sum(mean * mean))
    ratio = float(np.sum(whole * mean)) / square if square else 0.0
    if 0.7 < ratio < 1.4:
        return Kind.MEAN
    return Kind.SUM if 1.4 <= ratio < 2.8 else Kind.UNKNOWN

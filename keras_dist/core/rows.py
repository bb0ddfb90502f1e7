"""Splits the rows of a global batch over replicas.

Replica `r` of `N` gets rows `ceil(n * r / N)` up to `ceil(n * (r + 1) / N)`: in
order, sizes at most one apart, replica 0 never without rows.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keras import ops


@dataclass(frozen=True)
class Share:
    """One replica's rows of a step's global batch.

    Args:
        rows: Integer, number of this replica's rows; an integer scalar tensor
            if the batch size is known at run time only. With 0 rows, the
            replica runs on a copy of some row, which counts nowhere.
        total: Integer or integer scalar tensor, rows of the global batch.
    """

    rows: Any
    total: Any

    @property
    def weight(self) -> Any:
        """`rows / total`: the replica mean's weight in the global mean."""
        return self.ratio(self.rows, self.total)

    @property
    def inverse(self) -> Any:
        """`total / rows`, finite if there are no rows."""
        if isinstance(self.rows, int):
            return self.total / max(self.rows, 1)
        return self.ratio(self.total, ops.maximum(self.rows, 1))

    @staticmethod
    def ratio(numerator: Any, denominator: Any) -> Any:
        """Divides; a float32 scalar tensor if an operand is a tensor.

        Args:
            numerator: Integer or integer scalar tensor.
            denominator: Integer or integer scalar tensor.
        """
        if isinstance(numerator, int) and isinstance(denominator, int):
            return numerator / denominator
        return ops.cast(numerator, "float32") / ops.cast(denominator, "float32")

    def trim(self, values: Any) -> Any:
        """Returns the rows of `values` that count: all of them, or none.

        Args:
            values: Tensor with rows along axis 0.
        """
        if isinstance(self.rows, int):
            return values if self.rows else values[:0]
        return values[: ops.shape(values)[0] * ops.cast(self.rows > 0, "int32")]

    def keep(self, value: Any) -> Any:
        """Returns `value`, or zero if this replica has no rows, even for NaN.

        Args:
            value: Number or tensor.
        """
        if isinstance(self.rows, int):
            if self.rows or not hasattr(value, "shape"):
                return value if self.rows else 0
            # Gradients flow as on other replicas, because the backward pass may
            # have meetings too.
            return ops.where(False, value, ops.zeros_like(value))
        return ops.where(self.rows > 0, value, ops.zeros_like(value))


# The share in a replica function: its batch is split already.
WHOLE = Share(1, 1)


def bounds(total: Any, parts: int) -> list[Any]:
    """Returns the first row of each share, and the end of the last one.

    Args:
        total: Integer or integer scalar tensor, number of rows.
        parts: Integer, number of replicas.

    Returns:
        List of `parts + 1` values of the type of `total`.

    Example:

    >>> bounds(10, 4)
    [0, 3, 5, 8, 10]
    """
    return [(total * part + parts - 1) // parts for part in range(parts + 1)]


def ranges(edges: Sequence[int]) -> list[range]:
    """Returns the rows between the edges of shares.

    Example:

    >>> from keras_dist.core.rows import ranges
    >>> ranges(bounds(5, 2))
    [range(0, 3), range(3, 5)]
    """
    return [range(*pair) for pair in itertools.pairwise(edges)]


def scaled(value: Any, factor: Any) -> Any:
    """Returns `value * factor`, in the dtype of `value`."""
    if isinstance(factor, (int, float)):
        return value * factor
    return value * ops.cast(factor, value.dtype)


def scaled_gradient(value: Any, factor: Any) -> Any:
    """Returns `value` itself, with gradients multiplied by `factor`."""

    def same(value: Any) -> Any:
        def backward(*gradient: Any, upstream: Any = None) -> Any:
            return scaled(gradient[0] if upstream is None else upstream, factor)

        return value, backward

    return ops.custom_gradient(same)(value)

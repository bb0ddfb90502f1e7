"""Splits the rows of a global batch over replicas.

Replica `r` of `N` gets rows `ceil(n * r / N)` up to `ceil(n * (r + 1) / N)`: in
order, sizes at most one apart, replica 0 never without rows.
"""

import itertools
import warnings
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_dist.core.nests import named_leaves


@dataclass(frozen=True)
class RowShard:
    """One replica's rows of a step's global batch.

    Args:
        rows: Integer, number of this replica's rows; an integer scalar tensor
            if the batch size is known at run time only. With 0 rows, the
            replica runs on a copy of some row, which counts nowhere.
        total: Integer or integer scalar tensor, rows of the global batch.
        start: Integer or integer scalar tensor, the first of its rows.
    """

    rows: Any
    total: Any
    start: Any = 0

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
    def ratio(numerator: object, denominator: object) -> Any:
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

    def keep(self, value: object) -> Any:
        """Returns `value`, or zero if this replica has no rows, even for NaN.

        Args:
            value: Number or tensor.
        """
        if isinstance(self.rows, int):
            if self.rows or not hasattr(value, "shape"):
                return value if self.rows else 0
            # Gradients flow as on other replicas, because the backward pass may
            # have a rendezvous too.
            return ops.where(False, value, ops.zeros_like(value))
        return ops.where(self.rows > 0, value, ops.zeros_like(value))

    def either(self, value: object, other: object) -> Any:
        """Returns `value`, or `other` if this replica has no rows."""
        if isinstance(self.rows, int):
            return value if self.rows else other
        return ops.where(self.rows > 0, value, other)


class OwnRows:
    """An array of a global batch, of which this worker has its own rows only.

    Its shape is that of the global batch. Slices of its own rows are arrays;
    there is no other way to its values.

    Args:
        rows: Array or tensor, the rows that are here, along axis 0.
        first: Integer, the place of the first of them in the global batch.
        total: Integer, the rows of the global batch.
        code: Integer, a checksum of the global batch.
    """

    __slots__ = ("code", "first", "rows", "shape")

    def __init__(
        self, rows: Any, first: int, total: int, code: int = 0
    ) -> None:
        self.rows = rows
        self.first = first
        self.code = code
        self.shape = (total, *rows.shape[1:])

    @property
    def dtype(self) -> Any:
        return self.rows.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return int(self.shape[0])

    def map(self, fn: Callable[[Any], Any]) -> "OwnRows":
        """Returns the same rows after `fn`, which keeps them apart."""
        return OwnRows(fn(self.rows), self.first, self.shape[0], self.code)

    def __getitem__(self, rows: slice) -> Any:
        if not isinstance(rows, slice):
            # An `IndexError` would end a loop over rows in silence.
            raise TypeError(self._error(f"index {rows!r}"))
        start, stop, step = rows.indices(self.shape[0])
        if stop <= start:
            return self.rows[:0]
        last = self.first + self.rows.shape[0]
        if step != 1 or start < self.first or stop > last:
            raise IndexError(self._error(f"rows {start} to {stop}"))
        return self.rows[start - self.first : stop - self.first]

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(self._error("all rows"))

    def _error(self, received: str) -> str:
        last = self.first + self.rows.shape[0]
        return (
            "A row of a global batch was read that this worker has not "
            f"loaded. Received: {received} of an array of shape {self.shape}. "
            f"Expected: rows from {self.first} to {last}."
        )


# The share in a replica function: its batch is split already.
WHOLE = RowShard(1, 1)


def bounds(total: Any, parts: int) -> list[Any]:
    """Returns the first row of each share, and the end of the last one."""
    return [(total * part + parts - 1) // parts for part in range(parts + 1)]


def ranges(edges: Sequence[int]) -> list[range]:
    """Returns the rows between the edges of shares."""
    return [range(*pair) for pair in itertools.pairwise(edges)]


def scaled(value: Any, factor: Any) -> Any:
    """Returns `value * factor`, in the dtype of `value`."""
    if isinstance(factor, (int, float)):
        return value * factor
    return value * ops.cast(factor, value.dtype)


def scaled_gradient(value: object, factor: object) -> Any:
    """Returns `value` itself, with gradients multiplied by `factor`."""

    def same(value: object) -> Any:
        def backward(*gradient: Any, upstream: object = None) -> Any:
            return scaled(gradient[0] if upstream is None else upstream, factor)

        return value, backward

    return ops.custom_gradient(same)(value)


def readable(leaf: object) -> Any:
    """Converts a leaf to a NumPy array or a tensor of the framework in use."""
    if isinstance(leaf, np.ndarray) or leaf is None:
        return leaf
    if keras.ops.is_tensor(leaf):
        return leaf
    if isinstance(leaf, keras.Variable):
        return leaf.value
    if isinstance(leaf, (bool, int, float)):
        return np.asarray(leaf, keras.backend.standardize_dtype(type(leaf)))
    if hasattr(leaf, "detach"):  # PyTorch's, under another backend
        leaf = leaf.detach().cpu()
    if hasattr(leaf, "__array__") or isinstance(leaf, (str, bytes)):
        return np.asarray(leaf)
    return leaf


def sliceable(leaf: Any) -> Any:
    """Returns a NumPy view of a tensor in host memory, else the tensor."""
    if isinstance(leaf, np.ndarray):
        return leaf
    try:
        return np.asarray(memoryview(leaf))
    except (TypeError, ValueError, BufferError):
        return leaf  # on another device, or of a dtype without a view


def shape_of(leaf: object) -> tuple[int | None, ...]:
    """Returns the shape of an array or tensor, `()` for anything else."""
    return tuple(getattr(leaf, "shape", ()))


def check_batched(nest: object) -> None:
    """Raises `ValueError` if all leaves of an element or spec are scalars."""
    leaves = [(p, x) for p, x in named_leaves(nest) if x is not None]
    if all(not shape_of(leaf) for _, leaf in leaves):
        described = ", ".join(describe(*leaf) for leaf in leaves) or repr(nest)
        raise ValueError(
            "The dataset is not batched, so its elements can't be split over "
            f"replicas; batch first. Received: an element of {described}. "
            "Expected: batches of the global batch size, such as those of "
            "`dataset.batch(global_batch_size)`."
        )


def check_rows(nest: object) -> Any:
    """Returns the number of rows of a batch, in a graph a tensor."""
    check_batched(nest)
    leaves = [(p, x) for p, x in named_leaves(nest) if x is not None]
    first = next(leaf for leaf in leaves if shape_of(leaf[1]))
    rows = shape_of(first[1])[0]
    for path, leaf in leaves:
        if not shape_of(leaf) or shape_of(leaf)[0] not in (rows, None):
            raise ValueError(
                "All arrays of a batch must have the same number of rows. "
                f"Received: {describe(path, leaf)}, but {describe(*first)}. "
                f"Expected: {rows} rows along axis 0 in each array, or None."
            )
    return keras.ops.shape(first[1])[0] if rows is None else int(rows)


def describe(path: str, leaf: Any) -> str:
    """Describes a leaf for an error message: its path, shape and dtype."""
    where = f"leaf `{path}`" if path else "one leaf"
    if not hasattr(leaf, "shape"):
        return f"{where} of type {type(leaf).__name__}"
    return f"{where} of shape {shape_of(leaf)} and dtype {leaf.dtype}"


def text_of_unequal(lengths: Iterable[int], on_each: bool) -> str:
    """Returns the warning of a batch whose arrays differ in their rows."""
    numbers = ", ".join(str(n) for n in dict.fromkeys(map(int, lengths)))
    who = (
        "Each replica computes the whole batch"
        if on_each
        else (
            "Replica 0 computes the whole batch, and the others compute nothing"
        )
    )
    return (
        f"The arrays of a batch have different numbers of rows ({numbers}), "
        f"so the batch axis is ambiguous, and the batch is not split. {who}. "
        "The results are the same as on one device, but the replicas do not "
        "share the work. Expected: the same number of rows in all arrays. If "
        "an array has no axis for rows, repeat it for each row, or keep it in "
        "the model."
    )


class UnequalLengths:
    """A warning about batches with unequal arrays that is shown once."""

    def __init__(self) -> None:
        self._is_told = False

    def tell(self, lengths: Iterable[int], on_each: bool) -> None:
        """Warns with `text_of_unequal`, the first time."""
        if not self._is_told:
            self._is_told = True
            warnings.warn(text_of_unequal(lengths, on_each), stacklevel=2)

    def tell_of_sparse(self) -> None:
        """Warns of a batch with a sparse array, the first time."""
        if not self._is_told:
            self._is_told = True
            warnings.warn(_SPARSE, stacklevel=2)


_SPARSE = (
    "A batch has a sparse array, which JAX keeps as a list of entries and not "
    "as rows, so the batch is not split. Each replica computes the whole "
    "batch. The results are the same as on one device, but the replicas do "
    "not share the work. Expected: dense arrays, to share it."
)

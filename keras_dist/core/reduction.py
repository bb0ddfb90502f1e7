"""ReduceOp: reductions, and checks of the values and axes to reduce."""

import enum
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

_SMALL = ("bool", "int8", "int16", "uint8", "uint16")


class ReduceOp(enum.Enum):
    """The operation that combines the values of several replicas.

    `SUM` and `MEAN` are those of `tf.distribute`; `MIN`, `MAX` and `PROD` are
    additions. Methods that take a `ReduceOp` also take its name, in upper or
    lower case.

    Example:

    >>> keras_dist.ReduceOp("SUM")
    <ReduceOp.SUM: 'SUM'>
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"
    PROD = "PROD"

    @staticmethod
    def from_variable_aggregation(aggregation: str) -> "ReduceOp":
        """Returns the operation of a variable's `aggregation`.

        Args:
            aggregation: String, `"sum"` or `"mean"`.

        Raises:
            ValueError: If the aggregation is not a reduction.

        Example:

        >>> keras_dist.ReduceOp.from_variable_aggregation("mean").name
        'MEAN'
        """
        name = str(getattr(aggregation, "name", aggregation)).upper()
        if name not in ("SUM", "MEAN"):
            raise ValueError(
                "Only 'sum' and 'mean' aggregations are reductions. "
                f"Received: aggregation={aggregation!r}."
            )
        return ReduceOp[name]


def parse_reduce_op(reduce_op: object) -> ReduceOp:
    """Converts a user's `reduce_op` to a `ReduceOp`."""
    if isinstance(reduce_op, ReduceOp):
        return reduce_op
    if isinstance(reduce_op, enum.Enum):  # tf.distribute's own
        reduce_op = reduce_op.value
    if not isinstance(reduce_op, str):
        raise TypeError(
            "Expected `reduce_op` to be a `keras_dist.ReduceOp`, or the name "
            f"of one. Received: {reduce_op!r} of type "
            f"{type(reduce_op).__name__}."
        )
    try:
        return ReduceOp[reduce_op.upper()]
    except KeyError:
        names = ", ".join(op.name for op in ReduceOp)
        raise ValueError(
            f"{reduce_op!r} is not a valid ReduceOp. Expected one of: {names}."
        ) from None


def checked_axes(axis: Any, rank: int) -> tuple[int, ...]:
    """Returns a user's `axis` as sorted, non-negative axes without repeats."""
    asked = list(axis) if isinstance(axis, (list, tuple)) else [axis]
    for dimension in asked:
        if not isinstance(dimension, int) or not -rank <= dimension < rank:
            raise ValueError(
                f"Invalid reduction dimension. Received: axis={axis!r} for a "
                f"value with {rank} axes. Expected: integers from {-rank} to "
                f"{rank - 1}, or `None` to reduce over replicas only."
            )
    return tuple(sorted({dimension % rank for dimension in asked}))


def combine(op: ReduceOp, values: Sequence[Any]) -> Any:
    """Combines tensors of one shape, on one device, element by element."""
    check_shapes(values)
    values = [widened(op, value) for value in values]
    if op in (ReduceOp.MIN, ReduceOp.MAX) and len(values) > 1:
        # Not in pairs: Keras on torch would narrow `int64` to `int32`, and on
        # TensorFlow the gradient at a tie would all go to the first value.
        return _ALONG_AXES[op](ops.stack(values), axis=0)
    result = values[0]
    # Empty tensors need no addition, and Keras on TensorFlow would take one
    # of shape (0, n) for a bias.
    others = () if 0 in tuple(result.shape) else values[1:]
    for value in others:
        result = _PAIRWISE[op](result, value)
    if op is ReduceOp.MEAN:
        result = ops.true_divide(result, len(values))
    return result


def widened(op: ReduceOp, value: Any) -> Any:
    """Casts booleans and small integers to `int32`: sums might not fit."""
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return value
    is_small = keras.backend.standardize_dtype(value.dtype) in _SMALL
    return ops.cast(value, "int32") if is_small else value


def check_numbers(value: object) -> None:
    """Raises `TypeError` unless a value is a number or an array of numbers."""
    dtype = getattr(value, "dtype", None)
    if dtype is None and not isinstance(value, (list, tuple)):
        dtype = np.asarray(value).dtype
    is_text = str(getattr(dtype, "name", dtype)) == "string"
    if not is_text and getattr(dtype, "kind", None) not in ("O", "S", "U"):
        return
    raise TypeError(
        f"Only numbers and booleans can be reduced.\nReceived: {value!r}. "
        "Expected: tensors, arrays or Python numbers. "
        "`strategy.experimental_local_results` returns the replicas' values "
        "unchanged, and `gather` concatenates tensors of strings."
    )


def is_zero(value: Any) -> bool:
    """Returns true for a zero that is no tensor, and so is its own sum."""
    if isinstance(value, keras.Variable) or ops.is_tensor(value):
        return False
    return not np.any(value)


def check_shapes(values: Sequence[Any]) -> None:
    """Raises `ValueError` if the tensors' shapes differ."""
    shapes = [tuple(value.shape) for value in values]
    known = [shape for shape in shapes if None not in shape]
    if any(shape != known[0] for shape in known):
        raise ValueError(
            "Values can't be combined element by element: replicas have "
            f"different shapes.\nReceived: {shapes}. Expected: the same shape "
            "on each replica. Pass `axis=0` to `reduce` to reduce along rows "
            "as well, or use `gather`."
        )


def check_gather(values: Sequence[Any], axis: object) -> int:
    """Checks that tensors can be concatenated; returns the axis from 0."""
    shapes = [tuple(value.shape) for value in values]
    received = f"Received: shapes {shapes}, axis={axis!r}."
    rank = len(shapes[0])
    if any(len(shape) != rank for shape in shapes):
        raise ValueError(
            "Values of different rank can't be gathered: Shape mismatch. "
            f"{received} Expected: the same number of axes on each replica."
        )
    if not rank:
        raise ValueError(
            f"Scalars can't be gathered: they have no axis. {received} "
            "Expected: values with at least one axis; `keras.ops.reshape(x, "
            "(1,))` gives a scalar one."
        )
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise ValueError(
            f"`axis` is not an axis of the values to gather. {received} "
            f"Expected: an integer from {-rank} to {rank - 1}."
        )
    along = axis % rank
    others = [s[:along] + s[along + 1 :] for s in shapes]
    if any(
        None not in (mine, first) and mine != first
        for other in others
        for mine, first in zip(other, others[0], strict=True)
    ):
        raise ValueError(
            "Values can't be gathered: Shape mismatch on an axis other than "
            f"axis {along}. {received} Expected: Dimensions that are equal on "
            "all other axes."
        )
    return along


def reduce_axes(
    op: ReduceOp,
    values: Sequence[Any],
    axis: object,
    combine_fn: Callable[[ReduceOp, Sequence[Any]], Any],
    has_others: bool = False,
) -> Any:
    """Reduces tensors along axes, then over replicas; a mean is over all
    elements. `has_others`: `combine_fn` includes other workers."""
    axes = checked_axes(axis, len(values[0].shape))
    values = [widened(op, value) for value in values]
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        values = [v for v in values if 0 not in tuple(v.shape)] or values[:1]
        if has_others and 0 in tuple(values[0].shape):
            values = [_nothing(op, values[0], axes)]
    reduce = _ALONG_AXES[op]
    total = combine_fn(
        ReduceOp.SUM if op is ReduceOp.MEAN else op,
        [reduce(value, axis=axes) for value in values],
    )
    if op is not ReduceOp.MEAN:
        return total
    size = sum(_size(v, axes) for v in values)
    if has_others:
        size = combine_fn(
            ReduceOp.SUM, [ops.cast(ops.convert_to_tensor(size), "float32")]
        )
    return ops.true_divide(total, size)


def _nothing(op: ReduceOp, value: Any, axes: tuple[int, ...]) -> Any:
    """Returns the identity of `MIN` or `MAX`, of size 1 along each axis."""
    dtype = keras.backend.standardize_dtype(value.dtype)
    if keras.backend.is_float_dtype(dtype):
        worst = np.inf
    else:
        limits = np.iinfo(dtype)
        worst = limits.max if op is ReduceOp.MIN else limits.min
    shape = [1 if i in axes else n for i, n in enumerate(value.shape)]
    worst = -worst if worst == np.inf and op is ReduceOp.MAX else worst
    return ops.full(shape, worst, dtype=dtype)


def _size(value: object, axes: tuple[int, ...]) -> Any:
    shape = ops.shape(value)
    size = 1
    for axis in axes:  # `torch.compile` can't follow `math.prod`
        size = size * shape[axis]
    return size if isinstance(size, int) else ops.cast(size, "float32")


_PAIRWISE = {
    ReduceOp.SUM: ops.add,
    ReduceOp.MEAN: ops.add,
    ReduceOp.PROD: ops.multiply,
}
_ALONG_AXES = {
    ReduceOp.SUM: ops.sum,
    ReduceOp.MEAN: ops.sum,
    ReduceOp.MIN: ops.min,
    ReduceOp.MAX: ops.max,
    ReduceOp.PROD: ops.prod,
}

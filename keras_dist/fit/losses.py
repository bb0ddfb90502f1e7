"""Losses of the global batch, computed from each replica's rows.

Inside of a step, gradients are summed with weights `rows / total`. So a
replica's loss is such that the losses' mean over rows is the global loss:

- A loss of Keras that treats rows one by one stays on the replica; only its
  divisor (masked elements, summed weights) is summed over replicas.
- Any other loss (Dice, Tversky, Circle, a user's) is computed on the gathered
  rows by each replica, with gradients for its own rows.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_dist.core import context
from keras_dist.core import nests
from keras_dist.core.rows import RowShard
from keras_dist.core.rows import scaled
from keras_dist.core.rows import scaled_gradient
from keras_dist.internals import keras_internals
from keras_dist.internals.hooks import as_hook
from keras_dist.internals.keras_internals import is_of_keras
from keras_dist.replica import exchange
from keras_dist.replica.state import ReplicaStep
from keras_dist.replica.state import of_thread

_COUPLES_ROWS = {"dice", "tversky", "circle"}


@as_hook
def hook_call(
    original: Callable[..., Any],
    self: Any,
    y_true: object,
    y_pred: object,
    sample_weight: object = None,
) -> Any:
    """Stands for `Loss.__call__`; gathers rows for losses that couple them."""
    step = of_thread.step
    # Keras would take a batch of scalars for a single row. Outside of a step
    # the shape may be unknown.
    if step is None or (
        treats_rows_one_by_one(self) and len(getattr(y_pred, "shape", ())) != 1
    ):
        return original(self, y_true, y_pred, sample_weight)
    call = functools.partial(original, self)
    return _on_gathered_rows(step, call, self, (y_true, y_pred, sample_weight))


@as_hook
def hook_own_call(
    original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """Stands for a user's own `Loss.__call__`, to give it gathered rows."""
    step, method = of_thread.step, original.__get__(self, type(self))
    if step is None:
        return method(*args, **kwargs)
    names = list(kwargs)

    def call(*values: Any) -> Any:
        count = len(args)
        named = zip(names, values[count:], strict=True)
        return method(*values[:count], **dict(named))

    return _on_gathered_rows(step, call, self, (*args, *kwargs.values()))


@as_hook
def hook_reduction(
    original: Callable[..., Any],
    values: object,
    sample_weight: object = None,
    mask: object = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: object = None,
) -> Any:
    """Stands for the function by which all of Keras' losses reduce."""
    step = of_thread.step
    local = functools.partial(original, values, sample_weight, mask)
    # The loss function itself may return a scalar.
    is_whole = not len(getattr(values, "shape", ()))
    if step is None or is_whole or reduction in (None, "none"):
        return local(reduction=reduction, dtype=dtype)
    if reduction == "sum":
        total = local(reduction="sum", dtype=dtype)
        return scaled(total, step.share.inverse)
    weighted = reduction == "mean_with_sample_weight" and (
        sample_weight is not None
    )
    if mask is None and not weighted:
        # Rows have equally many elements: the replica's own mean will do.
        return local(reduction=reduction, dtype=dtype)
    # Keras multiplies the given weights by the mask, on PyTorch in place, so
    # that metrics see the product: do that exactly once here.
    mask, divisor = _mask_and_divisor(
        step, values, sample_weight, mask, reduction
    )
    total = original(values, sample_weight, mask, reduction="sum", dtype=dtype)
    mean = ops.divide_no_nan(total, ops.cast(divisor, total.dtype))
    return scaled(mean, step.share.inverse)


def scale(
    by: Callable[[Any, int], Any], original: Callable[[Any], Any], value: object
) -> Any:
    """Stands for Keras' scaling of mean losses by 1 / replicas, or its inverse.

    It is right in replica functions only, where `optimizer.apply` sums.
    """
    call = of_thread.call
    if call is not None:
        return by(value, call.strategy.num_replicas_in_sync)
    return value if context.has_strategy() else original(value)


def treats_rows_one_by_one(loss: object) -> bool:
    """Returns whether the loss of a row certainly depends on no other row."""
    if not is_of_keras(type(loss)):
        return False
    fn = getattr(loss, "fn", None)
    return fn is None or is_function_of_rows(fn)


def is_function_of_rows(fn: object) -> bool:
    """Returns whether it is a function of Keras that couples no rows."""
    name = getattr(fn, "__name__", None)
    return is_of_keras(fn) and name not in _COUPLES_ROWS


def _mask_and_divisor(
    step: ReplicaStep,
    values: Any,
    sample_weight: Any,
    mask: Any,
    reduction: str | None,
) -> tuple[Any, Any]:
    """Returns the mask or weights of elements, and the global sum's divisor."""
    dtype = keras.backend.result_type(values.dtype, "float32")
    if reduction == "mean_with_sample_weight":
        if sample_weight is not None:
            sample_weight = ops.copy(ops.cast(sample_weight, dtype))
        weights = keras_internals.losses.apply_mask(
            sample_weight, mask, dtype=dtype, reduction=reduction
        )
        return mask, _sum_over_replicas(step, [ops.sum(weights)])[0]
    local_sums = [
        ops.sum(ops.cast(mask, dtype)),
        _size(mask, dtype),
        _size(values, dtype),
    ]
    valid, of_mask, of_values = _sum_over_replicas(step, local_sums)
    # Masked elements weigh nothing, the others as much more.
    weight = ops.divide_no_nan(of_mask, valid)
    return ops.where(ops.cast(mask, "bool"), weight, 0), of_values


def _size(values: object, dtype: object) -> Any:
    shape = ops.convert_to_tensor(ops.shape(values), dtype="int32")
    return ops.cast(ops.prod(shape), dtype)


def _sum_over_replicas(step: ReplicaStep, local_values: list[Any]) -> Any:
    counted = step.share.keep(ops.stop_gradient(ops.stack(local_values)))
    total = step.replica.all_reduce("the divisor of a loss", counted)
    return [total[i] for i in range(len(local_values))]


def _on_gathered_rows(
    step: ReplicaStep,
    compute: Callable[..., Any],
    loss: object,
    arguments: tuple[Any, ...],
) -> Any:
    name = getattr(loss, "name", type(loss).__name__)
    arguments = gathered(step, f"loss '{name}'", arguments)
    with step.alone():
        value = compute(*arguments)
    if exchange.is_row_shaped(value):
        step.has_global_rows = True
    return value


def gathered(step: ReplicaStep, what: str, value: object) -> Any:
    """Returns a nest with the rows of all replicas.

    Gradients flow to this replica's rows only. They are divided by its weight,
    by which they are multiplied later, so that other gradients count once in
    all.
    """
    leaves = nests.leaves_of(value)
    place = step.place(what)

    def gather(
        everyone: list[exchange.Entry],
    ) -> tuple[list[exchange.Entry], list[int]]:
        have_rows = step.have_rows(place, everyone)
        places = [i for i, has_rows in enumerate(have_rows) if has_rows]
        parts = [([rows[i] for i in places], share) for rows, share in everyone]
        return step.exchange(parts), places

    local_entry = exchange.detached(leaves), step.share
    entries, places = step.replica.rendezvous(what, gather, local_entry)
    shares = [share for _, share in entries]
    everyone = [rows for rows, _ in entries]
    everyone[[share is step.share for share in shares].index(True)] = [
        _counted(leaves[i], step.share) for i in places
    ]
    merged = exchange.join_leaves(everyone, shares, exchange.mean_over_rows)
    for i, rows in zip(places, merged, strict=True):
        leaves[i] = _tied(rows, leaves[i], step.share)
    return nests.pack(value, leaves)


def _tied(rows: Any, local_rows: Any, share: RowShard) -> Any:
    """Returns all rows, with a way for the backward pass to a replica that has
    none of them."""
    has_none = isinstance(share.rows, int) and not share.rows
    if not has_none or not exchange.is_float(local_rows):
        return rows
    tied = rows + ops.cast(share.keep(ops.sum(local_rows)), rows.dtype)
    return _masked_as(rows, tied)


def _counted(leaf: object, share: RowShard) -> Any:
    if not exchange.is_float(leaf) or not keras.ops.is_tensor(leaf):
        return leaf
    return _masked_as(leaf, scaled_gradient(leaf, share.inverse))


def _masked_as(like: object, value: object) -> Any:
    """Returns a value with the mask of another one."""
    mask = keras_internals.get_mask(like)
    if mask is not None:
        keras_internals.set_mask(value, mask)
    return value

"""Loss functions whose sum over replicas is the global batch's loss."""

import functools
import operator
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_dist.core import context
from keras_dist.core.rows import scaled
from keras_dist.replica.replica_context import get_replica_context
from keras_dist.replica.scopes import base_scope
from keras_dist.replica.state import current_call
from keras_dist.replica.state import current_step


def compute_average_loss(
    per_example_loss: object,
    sample_weight: object = None,
    global_batch_size: object = None,
) -> Any:
    """Adds up a replica's losses and divides by the global batch's size.

    In a replica function and in a custom `train_step`, `optimizer.apply` sums
    the gradients over replicas, which gives the gradients of the mean over the
    global batch. On one device the result is just that mean.

    Args:
        per_example_loss: Tensor of shape `(rows, ...)`, this replica's losses.
        sample_weight: Tensor of weights, of the same shape or without some of
            the trailing axes.
        global_batch_size: Integer, or integer scalar tensor, to divide by. By
            default the number of rows of all replicas together; in
            `strategy.run`, replicas wait for each other to add it up.

    Returns:
        Scalar tensor of the loss' dtype, or of `floatx` if that is an integer.

    Raises:
        ValueError: If the loss is a scalar already, if the weights don't fit,
            or if `global_batch_size` is no positive scalar.
        TypeError: If `global_batch_size` is no integer.
        RuntimeError: In cross-replica context.

    Example:

    >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> losses = keras_dist.PerReplica([np.array([1.0, 2.0]), np.array([6.0])])
    >>> averages = strategy.run(keras_dist.compute_average_loss, (losses,))
    >>> float(strategy.reduce("SUM", averages, axis=None))
    3.0
    """
    _check_place("compute_average_loss")
    if global_batch_size is not None:
        _check_size(global_batch_size)
    losses = ops.convert_to_tensor(per_example_loss)
    if not len(losses.shape):
        raise ValueError(
            "per_example_loss must have at least one axis, the axis of rows.\n"
            f"Received: a scalar, {per_example_loss!r}. Expected: shape "
            "(rows, ...). Leave the reduction to this function: pass "
            "`reduction=None` to Keras' losses."
        )
    dtype = _float_dtype(losses)
    losses = ops.cast(losses, dtype)
    rows = ops.shape(losses)[0]
    if sample_weight is not None:
        losses = ops.cast(_weighted(losses, sample_weight), dtype)
    return _average(ops.sum(losses), rows, global_batch_size)


def scale_regularization_loss(regularization_loss: object) -> Any:
    """Divides a loss that is equal on each replica by the number of replicas.

    The optimizer sums gradients over replicas, so each replica contributes an
    equal part.

    Args:
        regularization_loss: Tensor, or a list of tensors such as
            `model.losses`.

    Returns:
        Scalar tensor, the sum of the losses; in `strategy.run` divided by the
        number of replicas.

    Raises:
        RuntimeError: In cross-replica context.

    Example:

    >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> loss = strategy.run(keras_dist.scale_regularization_loss, (6.0,))
    >>> [float(part) for part in loss.values]
    [3.0, 3.0]
    """
    _check_place("scale_regularization_loss")
    terms = regularization_loss
    if not isinstance(terms, (list, tuple)):
        terms = [terms]
    tensors = [ops.convert_to_tensor(term) for term in terms]
    sums = [ops.sum(ops.cast(t, _float_dtype(t))) for t in tensors]
    if not sums:
        return ops.zeros((), keras.config.floatx())
    total = functools.reduce(operator.add, sums)
    call = current_call()
    if call is None:
        return total
    return total / call.strategy.num_replicas_in_sync


def sum_over_rows(values: Any) -> Any:
    """Sums a tensor over the rows of the global batch.

    In `fit` and `strategy.run`, each replica gets the sum over the rows of all
    replicas, which meet for it. Without replicas, on one device and in `fit`
    on JAX, it is `keras.ops.sum(values, axis=0)`. Gradients flow through it.

    Args:
        values: Tensor of shape `(rows, ...)`, of this replica's rows.

    Returns:
        Tensor of shape `(...)`, in the dtype of `keras.ops.sum`.

    Raises:
        ValueError: If `values` is a scalar.

    Example:

    >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> rows = keras_dist.PerReplica([np.array([1.0, 2.0]), np.array([6.0])])
    >>> sums = strategy.run(keras_dist.sum_over_rows, (rows,))
    >>> [float(total) for total in sums.values]
    [9.0, 9.0]
    """
    if not isinstance(values, keras.KerasTensor):
        values = ops.convert_to_tensor(values)
    if not len(values.shape):
        raise ValueError(
            "values must have at least one axis, the axis of rows. Received: "
            f"a scalar, {values!r}. Expected: shape (rows, ...), one value or "
            "more for each row, which this function sums."
        )
    local_sum = ops.sum(values, axis=0)
    step = current_step()
    if step is not None:
        return step.replica.all_sum(
            "a sum over rows", step.share.keep(local_sum)
        )
    if current_call() is None:
        return local_sum
    context = get_replica_context()
    assert context is not None
    return context.all_reduce("SUM", local_sum)


def _check_place(name: str) -> None:
    strategy = context.current_strategy()
    if (
        strategy is not None
        and strategy.num_replicas_in_sync > 1
        and context.in_cross_replica_context()
        # With a scope, a step of `fit` is traced, on all rows at once.
        and base_scope() is None
    ):
        raise RuntimeError(
            f"You are calling `{name}` in cross replica context, while it was "
            f"expected to be called in replica context. Received: a call "
            f"under the scope of {strategy!r}. Call it in a function that "
            "`strategy.run` runs, or in a model's `train_step`."
        )


def _check_size(size: object) -> None:
    dtype = getattr(size, "dtype", None)
    if dtype is None:
        is_integer = isinstance(size, int) and not isinstance(size, bool)
    else:
        name = keras.backend.standardize_dtype(dtype)
        is_integer = keras.backend.is_int_dtype(name)
    error: type[Exception] = ValueError
    if len(getattr(size, "shape", ())):
        expected = "a scalar"
    elif not is_integer:
        error, expected = TypeError, "an integer"
    elif isinstance(size, (int, np.integer)) and size <= 0:
        expected = "positive"
    else:
        return
    raise error(
        f"global_batch_size must be {expected}. Received: {size!r} of type "
        f"{type(size).__name__}. Expected: the number of rows of the global "
        "batch, over all replicas."
    )


def _float_dtype(tensor: Any) -> str:
    dtype: str = keras.backend.standardize_dtype(tensor.dtype)
    is_float = keras.backend.is_float_dtype(dtype)
    return dtype if is_float else str(keras.config.floatx())


def _weighted(losses: Any, sample_weight: Any) -> Any:
    """Multiplies in `float32` at least: weights may not fit a `float16`."""
    weights = ops.convert_to_tensor(sample_weight)
    rank = len(losses.shape)
    if len(weights.shape) == rank + 1 and weights.shape[-1] == 1:
        weights = ops.squeeze(weights, axis=-1)
    if len(weights.shape) > rank:
        raise ValueError(
            "sample_weight must fit per_example_loss. Received: shape "
            f"{tuple(weights.shape)} for losses of shape "
            f"{tuple(losses.shape)}. Expected: a weight for each row or for "
            "each element."
        )
    while 0 < len(weights.shape) < rank:
        weights = ops.expand_dims(weights, axis=-1)
    dtype = keras.backend.result_type(losses.dtype, "float32")
    return ops.cast(losses, dtype) * ops.cast(weights, dtype)


def _average(total: Any, rows: Any, size: Any) -> Any:
    step, call = current_step(), current_call()
    if size is None and call is not None:
        size = call.replica.all_reduce("the number of rows", rows)
    elif size is not None and step is not None:
        # In `fit`, gradients are weighted by the replica's share of the rows.
        total = scaled(total, step.share.inverse)
    size = rows if size is None else size
    if isinstance(size, (int, np.integer)):
        return total / max(int(size), 1)
    return ops.divide_no_nan(total, ops.cast(size, total.dtype))

"""Checks and means that make replicas end a function with equal values."""

from collections.abc import Sequence
from typing import Any

import keras
from jax import lax

from keras_dist.core.nests import always
from keras_dist.core.nests import regroup
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.internals.keras_internals import is_seed
from keras_dist_jax.divergence import AXIS


class Tensor:
    """A placeholder for an array in a replica function's result.

    Args:
        value: The `jax.Array`, or a tracer.
    """

    def __init__(self, value: Any) -> None:
        self.kind = str(value.dtype), value.ndim

    def __repr__(self) -> str:
        dtype, ndim = self.kind
        return f"<a {dtype} tensor of rank {ndim}>"


def means_of(
    variables: Sequence[keras.Variable], differ: Sequence[bool]
) -> list[bool]:
    """Tells for each variable whether replicas average its new value.

    The variables are those without an aggregation; `differ` tells for each
    whether replicas may have left different values.

    Raises:
        ReplicaDivergenceError: If values differ, and the variable is trainable
            or not of a float dtype.
    """
    means = []
    for variable, differs in zip(variables, differ, strict=True):
        dtype = keras.backend.standardize_dtype(variable.dtype)
        # All replicas draw equally often from a seed generator, so that its
        # state stays equal.
        is_mean = differs and not is_seed(variable)
        if is_mean and (variable.trainable or "float" not in dtype):
            raise ReplicaDivergenceError(
                "Replicas may leave different values in variable "
                f"'{variable.path}', whose aggregation is "
                f"'{variable.aggregation}': they depend on what each replica "
                "has of its own. Expected: the same value on each replica. "
                "Make the variable with `aggregation='mean'`, 'sum' or "
                "'only_first_replica', or with `synchronization='on_read'` "
                "for a value of each replica's own."
            )
        means.append(is_mean)
    return means


def check_alike(outlines: Sequence[Any]) -> None:
    """Compares the results of all variants, the elements of arrays aside.

    Raises:
        ReplicaDivergenceError: If results differ in their lists, tuples and
            keys, in the dtype or rank of an array, or in anything that is no
            array.
    """
    for other in outlines[1:]:
        try:
            regroup([outlines[0], other], _check_leaves, always)
        except ValueError:
            raise ReplicaDivergenceError(
                "Replicas with different numbers of rows returned different "
                f"things. Received: {outlines[0]!r} and {other!r}. Expected: "
                "the same lists, tuples and keys on each replica, with tensors "
                "of one dtype and rank; and what is neither a tensor nor a "
                "number, the same on each. Look for a branch on shapes."
            ) from None


def _check_leaves(leaves: Sequence[Any]) -> None:
    first, other = leaves
    if isinstance(first, Tensor) and isinstance(other, Tensor):
        same = first.kind == other.kind
    elif isinstance(first, Tensor) or isinstance(other, Tensor):
        same = False
    else:
        same = bool(first is other or first == other)
    if not same:
        raise ValueError


def in_order(nest: Any, like: Any) -> Any:
    """Gives mappings in a nest the order of their keys in another one."""
    try:
        return regroup([like, nest], lambda leaves: leaves[1], always)
    except ValueError:  # `check_alike` says so
        return nest


def averaged(values: list[Any], differ: Sequence[bool]) -> list[Any]:
    """Replaces the values that may differ by their means over all replicas."""
    own = [v for v, differs in zip(values, differ, strict=True) if differs]
    means = iter(lax.pmean(own, AXIS) if own else [])
    return [
        next(means) if differs else value
        for value, differs in zip(values, differ, strict=True)
    ]

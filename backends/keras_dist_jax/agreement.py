"""Checks and means that make replicas end a function with equal values."""

from collections.abc import Sequence
from typing import Any

import keras
from jax import lax

from keras_dist.core.nests import leaves_of
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.internals.keras_internals import is_seed
from keras_dist_jax.divergence import AXIS


class Tensor:
    """A placeholder for an array in a replica function's result."""

    def __repr__(self) -> str:
        return "a tensor"


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
    """Compares the results of all variants, arrays aside.

    Raises:
        ReplicaDivergenceError: If results differ in something other than the
            values of arrays, or in the number of leaves.
    """
    first = outlines[0]
    for other in outlines[1:]:
        same = True
        try:
            mine, theirs = leaves_of(first), leaves_of(other)
            pairs = list(zip(mine, theirs, strict=True))
        except ValueError:
            pairs, same = [], False
        for a, b in pairs:
            if isinstance(a, Tensor) or isinstance(b, Tensor):
                same = same and isinstance(a, Tensor) is isinstance(b, Tensor)
            else:
                same = same and bool(a is b or a == b)
        if not same:
            raise ReplicaDivergenceError(
                "Replicas with different numbers of rows returned different "
                f"things that are no tensors. Received: {first!r} and "
                f"{other!r}. Expected: tensors and numbers, or the same on "
                "each replica. Return a tensor, or make it outside."
            )


def averaged(values: list[Any], differ: Sequence[bool]) -> list[Any]:
    """Replaces the values that may differ by their means over all replicas."""
    own = [v for v, differs in zip(values, differ, strict=True) if differs]
    means = iter(lax.pmean(own, AXIS) if own else [])
    return [
        next(means) if differs else value
        for value, differs in zip(values, differ, strict=True)
    ]

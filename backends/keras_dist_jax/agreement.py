"""What replicas have to leave alike, and what is made alike."""

from collections.abc import Sequence
from typing import Any

import keras
from jax import lax

from keras_dist.core.regroup import leaves_of
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.internals.keras_internals import is_seed
from keras_dist_jax.divergence import AXIS


class Tensor:
    """Stands for an array in what a function returned."""

    def __repr__(self) -> str:
        return "a tensor"


def means_of(
    variables: Sequence[keras.Variable], differ: Sequence[bool]
) -> list[bool]:
    """Which variables get the mean of what the replicas left in them.

    Args:
        variables: Sequence of variables that no aggregation is said of.
        differ: For each, whether replicas may have left different values.

    Raises:
        ReplicaDivergenceError: If one is no float, or is trained.
    """
    means = []
    for variable, differs in zip(variables, differ, strict=True):
        dtype = keras.backend.standardize_dtype(variable.dtype)
        # Replicas draw seeds as often as each other.
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
    """Refuses results that are no tensors and differ between replicas.

    Raises:
        ReplicaDivergenceError: If there is one, or another structure.
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
    """The values, with the mean of all replicas where they may differ."""
    own = [v for v, differs in zip(values, differ, strict=True) if differs]
    means = iter(lax.pmean(own, AXIS) if own else [])
    return [
        next(means) if differs else value
        for value, differs in zip(values, differ, strict=True)
    ]

"""Checks that replicas end with equal values, and means of different ones."""

from collections.abc import Sequence
from typing import Any

import keras
from jax import lax

from keras_dist.errors import ReplicaDivergenceError
from keras_dist.plugins import is_seed
from keras_dist_jax.programs.jaxprs import AXIS


def means_of(
    variables: Sequence[keras.Variable], differ: Sequence[bool]
) -> list[bool]:
    """Tells for each variable whether replicas average its new values."""
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
                f"'{variable.aggregation}', because the values depend on each "
                "replica's own data. Expected: the same value on each "
                "replica. Make the variable with `aggregation='mean'`, 'sum' "
                "or 'only_first_replica', or with "
                "`synchronization='on_read'` to keep a separate value on "
                "each replica."
            )
        means.append(is_mean)
    return means


def averaged(values: list[Any], differ: Sequence[bool]) -> list[Any]:
    """Replaces the values that may differ by their means over all replicas."""
    differing = [
        v for v, differs in zip(values, differ, strict=True) if differs
    ]
    means = iter(lax.pmean(differing, AXIS) if differing else [])
    return [
        next(means) if differs else value
        for value, differs in zip(values, differ, strict=True)
    ]


class OwnList(list[Any]):
    """A list that a rendezvous does not gather: it is a leaf to `jax.tree`."""

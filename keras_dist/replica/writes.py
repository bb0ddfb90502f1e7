"""Combines the assignments of a step's replicas, variable by variable."""

from collections.abc import Iterator
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any
from typing import TypeVar

import keras
from keras import ops

from keras_dist.core.rows import Share
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.internals import keras_internals
from keras_dist.replica.exchange import sum_over_replicas

if TYPE_CHECKING:
    from keras_dist.plugin.workers import Workers

T = TypeVar("T")
# From the variable's id to the variable and the value it was given.
Writes = dict[int, tuple[Any, Any]]


def by_variable(
    writes: Sequence[Writes], shares: Sequence[T]
) -> Iterator[tuple[keras.Variable, list[Any], list[T]]]:
    """Yields each variable with its values and the shares of their replicas."""
    written = {key: own[key][0] for own in writes for key in own}
    for key, variable in written.items():
        given = [
            (own[key][1], share)
            for own, share in zip(writes, shares, strict=True)
            if key in own
        ]
        yield variable, [v for v, _ in given], [share for _, share in given]


def check_integers(variable: Any, values: list[Any]) -> None:
    """Refuses integers that differ between replicas: they have no mean."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    if "float" in dtype or keras_internals.is_seed(variable):
        return
    variable.distribute_strategy.executor.check_equal(
        values,
        lambda: ReplicaDivergenceError(
            f"Variable '{variable.path}' of dtype '{dtype}' was assigned "
            "different values by the replicas of a step, which see only their "
            "own rows. Expected: the same value on each replica. Count in a "
            "metric, whose updates see all rows, or use a float variable, "
            "which gets the mean over rows."
        ),
    )


def totals(
    given: Sequence[tuple[Any, list[Any], list[Share]]],
    workers: "Workers | None",
) -> list[Any]:
    """Returns the new values of variables that every replica has added to.

    `given` has each variable, the values that replicas gave it, and their
    shares. `workers` are those whose replicas have added too, or `None`.
    """
    before = [ops.convert_to_tensor(variable) for variable, _, _ in given]
    added = [
        sum_over_replicas(
            [ops.convert_to_tensor(value) - old for value in values], shares
        )
        for old, (_, values, shares) in zip(before, given, strict=True)
    ]
    if workers is not None:
        added = workers.sum(added)
    return [old + new for old, new in zip(before, added, strict=True)]

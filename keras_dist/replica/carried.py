"""Scalars that travel with the sum of gradients over workers.

A pending update of a metric by scalars, as that of the loss, then needs no
collective of its own.
"""

from abc import ABC
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist.plugin.replica import Replica
from keras_dist.replica import exchange
from keras_dist.replica.state import ReplicaState
from keras_dist.replica.state import ReplicaStep


class CarriesScalars(ABC):
    """A `ReplicaRunner` whose sum of gradients takes scalars along."""

    @property
    @abstractmethod
    def carries_scalars(self) -> bool:
        """True if it does so among these workers, exactly."""

    @abstractmethod
    def sum_and_gather(
        self,
        replica: Replica,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        variables: Sequence[keras.Variable],
        scalars: Sequence[Any],
    ) -> tuple[list[Any], list[list[Any]]]:
        """Does `sum_gradients`; returns every worker's scalars too, in order.

        Args:
            replica: As for `sum_gradients`, like the next three.
            gradients: For each local replica, its gradients.
            weights: For each local replica, a number.
            variables: Sequence of the gradients' variables.
            scalars: Sequence of scalar tensors of numbers or booleans.
        """


def take_carried(step: ReplicaState) -> list[Any]:
    """Takes the updates that wait, if a sum of gradients takes them all along.

    Otherwise they keep waiting, in their order.
    """
    if (
        not isinstance(step, ReplicaStep)
        or not isinstance(step.runner, CarriesScalars)
        or not step.runner.carries_scalars
        or not all(map(_has_scalars, step.updates))
    ):
        return []
    updates, step.updates = step.updates, []
    return updates


def _has_scalars(update: Any) -> bool:
    leaves = [
        leaf.rows if isinstance(leaf, exchange.RowCount) else leaf
        for leaf in update.leaves
    ]
    return not any(map(exchange.is_row_shaped, leaves))


def sum_and_exchange(
    step: ReplicaState,
    gradients: Sequence[Sequence[Any]],
    weights: Sequence[Any],
    variables: Sequence[keras.Variable],
    own: list[exchange.Entry],
) -> tuple[list[Any], list[exchange.Entry]]:
    """Sums gradients; returns the entries of all replicas too, of scalars."""
    runner = step.runner
    sums: list[Any] = []
    # `take_carried` has taken nothing elsewhere.
    assert isinstance(runner, CarriesScalars) and isinstance(step, ReplicaStep)

    def gather(scalars: Sequence[Any], _: Any) -> list[list[Any]]:
        found, everyones = runner.sum_and_gather(
            step.replica, gradients, weights, variables, scalars
        )
        sums.extend(found)
        return everyones

    entries = step.exchange(
        own, exchange.mean_or_count, alike=True, gather=gather
    )
    return sums, entries

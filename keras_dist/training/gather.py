"""Gathering the rows of all replicas on each of them."""

from typing import Any

from keras_dist.training import nests
from keras_dist.training.join import detached
from keras_dist.training.join import join
from keras_dist.training.join import mean_over_rows
from keras_dist.training.step import ReplicaStep


class Gathered:
    """A nested value of each replica, and how to join them.

    Args:
        step: The `ReplicaStep` of this replica, which meets the others.
        what: String that names the meeting in errors.
        value: Nested structure of tensors, arrays and other things.
    """

    def __init__(self, step: ReplicaStep, what: str, value: Any) -> None:
        self._own = value
        self._own_share = step.share
        self._everyone = step.replica.meet(
            what, step.exchange, (detached(value), step.share)
        )

    def merge(self, with_gradients: bool = False) -> Any:
        """What one device would have had, as `join` makes it.

        Args:
            with_gradients: Boolean, whether gradients flow to this replica's
                own rows.

        Returns:
            Nested structure like each replica's.
        """
        everyone = list(self._everyone)
        if with_gradients:
            shares = [share for _, share in everyone]
            position = [s is self._own_share for s in shares].index(True)
            everyone[position] = nests.flatten(self._own), self._own_share
        return join(self._own, everyone, mean_over_rows)

"""What an executor gives the step hooks: a runner, and replicas in a step."""

import contextlib
from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import keras

from keras_dist.training.shares import Share

T = TypeVar("T")


class Replica(ABC):
    """One replica while it runs one step.

    Args:
        index: Integer, its position among all replicas.
        share: `Share`, its rows of the step's batch.
    """

    def __init__(self, index: int, share: Share) -> None:
        self.index = index
        self.share = share

    @abstractmethod
    def meet(self, what: str, fn: Callable[[list[Any]], T], value: Any) -> T:
        """Waits for all replicas of the step, then gives all `fn(values)`.

        Args:
            what: String that names the meeting in errors. Replicas that meet
                for different things have diverged.
            fn: Callable, run once, in cross-replica context, outside of any
                replica's state, without gradients.
            value: Anything. `fn` gets the list of the replicas' values, in
                replica order.

        Returns:
            What `fn` returned, the same on each replica.

        Raises:
            ReplicaDivergenceError: If the others are elsewhere or have left.
        """

    @abstractmethod
    def all_sum(self, what: str, value: Any) -> Any:
        """Sum of a float tensor over replicas, with gradients.

        Gradients of the step are weighted by each replica's `share.weight`
        when they are added up, so the backward pass here uses the same
        weights: replica `r` gets `sum_q weight_q * dy_q / weight_r`.

        Args:
            what: String that names the meeting in errors.
            value: Float tensor of the same shape on each replica.

        Returns:
            Tensor of that shape, equal on each replica.
        """

    @abstractmethod
    def read(self, variable: keras.Variable) -> Any:
        """This replica's value of a variable, as the framework reads it."""

    @abstractmethod
    def hold(self, variable: keras.Variable, value: Any) -> Any:
        """What a variable reads as after this replica assigned `value`.

        Returns `None` if the replica's own copy was written in place, so that
        there is nothing left to hold.
        """


class ReplicaRunner(ABC):
    """Runs the replicas of a step and combines their gradients."""

    @abstractmethod
    def run(self, fn: Callable[[Replica, Any], T], batch: Any) -> list[T]:
        """Cuts a global batch and calls `fn(replica, part)` on each replica.

        Args:
            fn: Callable. May use the replica's meetings.
            batch: Nested structure of arrays, rows along axis 0. Leaves
                without rows go to each replica whole.

        Returns:
            List of what the replicas returned, replica 0 first. Replicas
            without rows may be left out.
        """

    @abstractmethod
    def weighted_sum(
        self, gradients: Sequence[Sequence[Any]], weights: Sequence[Any]
    ) -> list[Any]:
        """Sums gradients over replicas, in as few collectives as possible.

        Args:
            gradients: For each replica, its gradients, `None` where there is
                none.
            weights: For each replica, a float or float scalar tensor.

        Returns:
            List with a gradient for each variable, `None` where no replica
            has one.
        """

    def updating(
        self, optimizer: keras.optimizers.Optimizer
    ) -> contextlib.AbstractContextManager[Any]:
        """Entered while an optimizer applies reduced gradients."""
        return contextlib.nullcontext()

    def building(self) -> contextlib.AbstractContextManager[Any]:
        """Entered while variables are made in the middle of a step."""
        return contextlib.nullcontext()

"""What an executor gives the step hooks: a runner, and replicas in a step."""

import contextlib
from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import keras
from keras import ops

from keras_dist.errors import ReplicaDivergenceError
from keras_dist.reduction import check_gather
from keras_dist.regroup import select
from keras_dist.training.shares import WHOLE
from keras_dist.training.shares import Share

T = TypeVar("T")
# Odd, large: seeds of different replicas do not meet while counters grow.
SEED_STRIDE = 0x2545F491


def divergence(places: Sequence[str | None]) -> ReplicaDivergenceError:
    """The error of replicas that meet at different points.

    Args:
        places: For each replica, the name of its meeting, or `None` if it
            has ended.
    """
    where = "; ".join(
        f"replica {index} had already ended"
        if place is None
        else f"replica {index} at {place}"
        for index, place in enumerate(places)
    )
    return ReplicaDivergenceError(
        "Replicas took different paths, so that some would wait forever: "
        f"{where}. Some replicas made a different number of "
        "replica_context().merge_call() calls, or of other calls that meet. "
        "Expected: the same losses, metrics, updates, batch statistics, "
        "collectives and assignments in the same order on each replica. Look "
        "for a branch on values that differ between replicas."
    )


@contextlib.contextmanager
def named(index: int, total: int) -> Iterator[None]:
    """Adds to an error which replica it is of."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"(on replica {index} of {total}, keras_dist)")
        raise


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
    def all_sum(self, what: str, value: Any, total: Any = None) -> Any:
        """Sum of a float tensor over replicas, with gradients.

        Gradients of the step are weighted by each replica's `share.weight`
        when they are added up, so the backward pass here uses the same
        weights: replica `r` gets `sum_q weight_q * dy_q / weight_r`.

        Args:
            what: String that names the meeting in errors.
            value: Float tensor of the same shape on each replica.
            total: The sum, where it is known already: then only gradients
                meet.

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

    def check_write(self, variable: keras.Variable) -> None:
        """Refuses an assignment where its value could not be held.

        Raises:
            UnsupportedModelError: In a part that the framework traces apart.
        """

    def committed(self) -> None:
        """Called once what it wrote in place has become every replica's."""

    @property
    def seed_offset(self) -> Any:
        """What it adds to seeds that it draws, below 2**31; 0 on the first."""
        return (self.index * SEED_STRIDE) % 2**31

    def own(self, nest: Any) -> Any:
        """This replica's view of a nest: its component of each value."""
        return select(self.index, nest)

    def all_gather(self, what: str, value: Any, axis: int) -> Any:
        """Every replica's float tensor, joined, with gradients.

        Args:
            what: String that names the meeting in errors.
            value: Float tensor with at least one axis.
            axis: Integer, along which sizes may differ between replicas.
        """

        def sizes_of(tensors: list[Any]) -> tuple[int, list[Any]]:
            positive = check_gather(tensors, axis)
            return positive, [ops.shape(t)[positive] for t in tensors]

        along, sizes = self.meet(what, sizes_of, ops.stop_gradient(value))
        before = sum(sizes[: self.index])
        after = sum(sizes[self.index + 1 :])
        padding = [(0, 0)] * len(value.shape)
        padding[along] = (before, after)
        # A sum of what each has in its place, for the sake of its gradient.
        return self.all_sum(what, ops.pad(value, padding))


class ReplicaRunner(ABC):
    """Runs replicas, and combines their gradients."""

    @abstractmethod
    def call(self, fn: Callable[[Replica], T]) -> list[T]:
        """Calls `fn(replica)` once for each replica, on its device.

        Args:
            fn: Callable. May use the replica's meetings. Each replica's
                `share` is the whole, so that sums over replicas are plain.

        Returns:
            List of what it returned, replica 0 first.

        Raises:
            BaseException: What the first replica to fail raised, with a note
                that names it, once all the others have unwound.
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


class StepRunner(ReplicaRunner):
    """Runs the steps of `fit` on replicas."""

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


class OnlyReplica(Replica):
    """The identity: one replica, which meets nobody.

    Args:
        outside: Callable that gives a context manager, in which the thread is
            in no replica.
    """

    def __init__(
        self, outside: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> None:
        super().__init__(0, WHOLE)
        self._outside = outside

    def meet(self, what: str, fn: Callable[[list[Any]], T], value: Any) -> T:
        with self._outside():
            return fn([value])

    def all_sum(self, what: str, value: Any, total: Any = None) -> Any:
        return value

    def read(self, variable: keras.Variable) -> Any:
        return variable.value

    def hold(self, variable: keras.Variable, value: Any) -> Any:
        variable.assign(value)
        return None

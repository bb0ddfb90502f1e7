"""What an executor gives the step hooks: a runner, and replicas in a step."""

import contextlib
from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import TYPE_CHECKING
from typing import Any
from typing import TypeVar

import keras
from keras import ops

from keras_dist.core.reduction import check_gather
from keras_dist.core.regroup import select
from keras_dist.core.rows import WHOLE
from keras_dist.core.rows import Share
from keras_dist.errors import ReplicaDivergenceError

if TYPE_CHECKING:
    from keras_dist.core.plan import Plan
    from keras_dist.plugin.workers import Workers
    from keras_dist.replica.state import ReplicaState

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


@dataclass(frozen=True)
class Group:
    """The workers that a replica's worker is among.

    Args:
        workers: `Workers`, or `None` without others.
        first: Integer, the position of this worker's first replica among all.
        shares: Tuple with the `Share` of each worker, of the step's batch.

    Attributes:
        said: Dict from what a replica has warned of to that replica's index.
    """

    workers: "Workers | None" = None
    first: int = 0
    shares: tuple[Share, ...] = ()
    said: dict[Any, int] = field(default_factory=dict, compare=False)


ALONE = Group()


def group_of(
    plan: "Plan", workers: "Workers | None", edges: Sequence[Any]
) -> Group:
    """The workers of a step's replicas, and the rows that each has.

    Args:
        plan: The `Plan`.
        workers: Its `Workers`, or `None`.
        edges: Sequence with, for each replica of all workers, the row where
            its share begins, and in the end the number of rows.
    """
    if workers is None:
        return Group()
    each = plan.num_local_replicas
    ends = edges[::each]
    shares = tuple(
        Share(stop - start, edges[-1])
        for start, stop in zip(ends[:-1], ends[1:], strict=True)
    )
    return Group(workers, plan.first_replica, shares)


class Replica(ABC):
    """One replica while it runs one step.

    Args:
        index: Integer, its position among the replicas of this worker.
        share: `Share`, its rows of the step's batch.
        group: `Group`, the workers that this one is among.
    """

    def __init__(self, index: int, share: Share, group: Group = ALONE) -> None:
        self.index = index
        self.share = share
        self.group = group

    @property
    def id(self) -> int:
        """Its position among the replicas of all workers."""
        return self.group.first + self.index

    def repeats(self, warning: Hashable) -> bool:
        """Whether another replica of this run has warned of the same."""
        if self.group is ALONE:
            return False
        return self.group.said.setdefault(warning, self.index) != self.index

    @abstractmethod
    def meet(self, what: str, fn: Callable[[list[Any]], T], value: Any) -> T:
        """Waits for this worker's replicas, then gives all `fn(values)`.

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
        """Sum of a float tensor over all replicas, with gradients.

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

    def check_meeting(self, what: str) -> None:
        """Refuses a place where the replicas can't meet.

        Args:
            what: String that names the meeting in the error.

        Raises:
            UnsupportedModelError: In a part that the framework traces apart.
        """

    def check_write(self, variable: keras.Variable) -> None:
        """Refuses an assignment where its value could not be held.

        Raises:
            UnsupportedModelError: In a part that the framework traces apart.
        """

    def has_changed(
        self,
        state: "ReplicaState",
        gradients: Sequence[Any],
        variables: Sequence[keras.Variable],
    ) -> bool:
        """Whether gradients are certainly not as they were computed.

        Args:
            state: The `ReplicaState` that it runs in.
            gradients: Sequence of tensors or `None`.
            variables: Sequence of the variables they belong to, or none.
        """
        return False

    def committed(self) -> None:
        """Called once what it wrote in place has become every replica's."""

    @property
    def seed_offset(self) -> Any:
        """What it adds to seeds that it draws, below 2**31; 0 on the first."""
        return (self.id * SEED_STRIDE) % 2**31

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

        workers = self.group.workers

        def sizes_of(tensors: list[Any]) -> tuple[int, list[Any]]:
            positive = check_gather(tensors, axis)
            sizes = [ops.shape(t)[positive] for t in tensors]
            if workers is not None:
                sizes = workers.concatenate_numbers(sizes)
            return positive, sizes

        along, sizes = self.meet(what, sizes_of, ops.stop_gradient(value))
        before = sum(sizes[: self.id])
        after = sum(sizes[self.id + 1 :])
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
        """Sums gradients over all replicas, in as few collectives as can be.

        Args:
            gradients: For each local replica, its gradients, `None` where
                there is none.
            weights: For each local replica, a float or float scalar tensor.

        Returns:
            List with a gradient for each variable, `None` where no replica
            has one.
        """

    def sum_gradients(
        self,
        replica: Replica,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        variables: Sequence[keras.Variable],
    ) -> list[Any]:
        """`weighted_sum`, in a meeting of a step's replicas.

        Args:
            replica: One of them.
            gradients: As for `weighted_sum`.
            weights: As for `weighted_sum`.
            variables: Sequence of the variables that they belong to.
        """
        return self.weighted_sum(gradients, weights)

    def updating(
        self, optimizer: keras.optimizers.Optimizer
    ) -> contextlib.AbstractContextManager[Any]:
        """Entered while an optimizer applies reduced gradients."""
        return contextlib.nullcontext()

    def probing(self) -> contextlib.AbstractContextManager[Any]:
        """Entered while a layer is called on other rows, without gradients.

        What is computed in it is computed at once, and has values.
        """
        return contextlib.nullcontext()

    def building(self) -> contextlib.AbstractContextManager[Any]:
        """Entered while variables are made in the middle of a step."""
        return contextlib.nullcontext()


class StepRunner(ReplicaRunner):
    """Runs the steps of `fit` on replicas."""

    # Whether a step may be called before its batch has values.
    traces_steps = False

    @abstractmethod
    def run(
        self,
        fn: Callable[[Replica, Any], T],
        batch: Any,
        is_whole: bool = False,
    ) -> list[T]:
        """Cuts a global batch and calls `fn(replica, part)` on each replica.

        Args:
            fn: Callable. May use the replica's meetings.
            batch: Nested structure of arrays, rows along axis 0. Leaves
                without rows go to each replica whole.
            is_whole: Boolean, whether the first replica gets all rows.

        Returns:
            List of what the replicas returned, replica 0 first. Replicas
            without rows may be left out.
        """

    def rehearsing(self) -> contextlib.AbstractContextManager[Any]:
        """Entered while a step is called that computes, and keeps nothing."""
        return contextlib.nullcontext()


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

"""The interface of replicas: a runner, and replicas in a step.

An executor implements both; the hooks of `fit` and of functions use them.
"""

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

from keras_dist.core.nests import select
from keras_dist.core.reduction import check_gather
from keras_dist.core.rows import WHOLE
from keras_dist.core.rows import Share
from keras_dist.errors import ReplicaDivergenceError

if TYPE_CHECKING:
    from keras_dist.core.plan import Plan
    from keras_dist.plugin.workers import Workers

T = TypeVar("T")
# Odd and large: seeds of different replicas stay apart while counters grow.
SEED_STRIDE = 0x2545F491


def divergence(places: Sequence[str | None]) -> ReplicaDivergenceError:
    """Returns the error of replicas that meet at different points.

    `places` has, for each replica, the name of its meeting, or `None` if the
    replica has ended.
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
    """Adds a note to errors that names the replica that raised."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"(on replica {index} of {total}, keras_dist)")
        raise


@dataclass(frozen=True)
class ReplicaGroup:
    """The workers that take part in a step, and each one's rows.

    Args:
        workers: `Workers`, or `None` without others.
        first: Integer, the position of this worker's first replica among all.
        shares: Tuple with each worker's `Share` of the step's batch.

    Attributes:
        said: Dict from each warning to the index of the first replica that gave
            it.
    """

    workers: "Workers | None" = None
    first: int = 0
    shares: tuple[Share, ...] = ()
    said: dict[Any, int] = field(default_factory=dict, compare=False)


ALONE = ReplicaGroup()


def group_of(
    plan: "Plan", workers: "Workers | None", edges: Sequence[Any]
) -> ReplicaGroup:
    """Returns the workers of a step's replicas, and the rows of each.

    `edges` has, for each replica of all workers, the row where its share
    begins, and at the end the number of rows.
    """
    if workers is None:
        return ReplicaGroup()
    each = plan.num_local_replicas
    ends = edges[::each]
    shares = tuple(
        Share(stop - start, edges[-1])
        for start, stop in zip(ends[:-1], ends[1:], strict=True)
    )
    return ReplicaGroup(workers, plan.first_replica, shares)


class Replica(ABC):
    """One replica while it runs one step.

    Args:
        index: Integer, its position among the replicas of this worker.
        share: `Share`, its rows of the step's batch.
        group: `ReplicaGroup`, the workers that this one is among.
    """

    def __init__(
        self, index: int, share: Share, group: ReplicaGroup = ALONE
    ) -> None:
        self.index = index
        self.share = share
        self.group = group

    @property
    def id(self) -> int:
        """The replica's position among the replicas of all workers."""
        return self.group.first + self.index

    def repeats(self, warning: Hashable) -> bool:
        """Returns whether another replica of this run gave the same warning."""
        if self.group is ALONE:
            return False
        return self.group.said.setdefault(warning, self.index) != self.index

    @abstractmethod
    def meet(self, what: str, fn: Callable[[list[Any]], T], value: Any) -> T:
        """Waits for this worker's replicas, then returns `fn(values)` to all.

        Args:
            what: String that names the meeting in errors. Replicas that meet
                for different things have diverged.
            fn: Callable, run once, in cross-replica context, outside of any
                replica's state, without gradients. It is given the list of the
                replicas' values, in replica order.
            value: This replica's value, which may be anything.

        Returns:
            The result of `fn`, the same on each replica.

        Raises:
            ReplicaDivergenceError: If other replicas meet at another point or
                have ended.
        """

    @abstractmethod
    def all_sum(self, what: str, value: Any, total: Any = None) -> Any:
        """Sums a float tensor over all replicas, with gradients.

        When the step's gradients are summed, they are weighted by each
        replica's `share.weight`. So the backward pass here uses the same
        weights: replica `r` gets `sum_q weight_q * dy_q / weight_r`.

        Args:
            what: String that names the meeting in errors.
            value: Float tensor of the same shape on each replica.
            total: The sum, if it is known already: then replicas meet in the
                backward pass only.

        Returns:
            Tensor of that shape, equal on each replica.
        """

    @abstractmethod
    def read(self, variable: keras.Variable) -> Any:
        """Returns this replica's value of a variable.

        Args:
            variable: A `keras.Variable`.

        Returns:
            Tensor of the framework, or `None` if the variable has no value yet.
        """

    @abstractmethod
    def hold(self, variable: keras.Variable, value: Any) -> Any:
        """Returns a variable's value after this replica's assignment.

        Args:
            variable: A `keras.Variable`.
            value: Tensor that this replica assigned.

        Returns:
            Tensor, or `None` if the replica's own copy was written in place and
            nothing is left to hold.
        """

    def check_meeting(self, what: str) -> None:
        """Refuses a meeting where the replicas can't meet.

        Args:
            what: String that names the meeting in the error.

        Raises:
            UnsupportedModelError: In code that the framework traces separately,
                such as the body of a loop.
        """

    def check_write(self, variable: keras.Variable) -> None:
        """Refuses an assignment where its value can't be held.

        Args:
            variable: A `keras.Variable`.

        Raises:
            UnsupportedModelError: In code that the framework traces separately,
                such as the body of a loop.
        """

    def has_changed(
        self,
        state: Any,
        gradients: Sequence[Any],
        variables: Sequence[keras.Variable],
    ) -> bool:
        """Returns whether gradients certainly differ from those computed.

        Args:
            state: The `ReplicaState` that this replica runs in.
            gradients: Sequence of tensors or `None`.
            variables: Sequence of the gradients' variables; may be empty.
        """
        return False

    def committed(self) -> None:
        """Called when values written in place are every replica's."""

    @property
    def seed_offset(self) -> Any:
        """The offset of this replica's seeds: below 2**31, 0 on the first."""
        return (self.id * SEED_STRIDE) % 2**31

    def own(self, nest: Any) -> Any:
        """Returns this replica's view of a nest: its component of each value.

        Args:
            nest: Nest of values, `PerReplica` ones among them.
        """
        return select(self.index, nest)

    def all_gather(self, what: str, value: Any, axis: int) -> Any:
        """Concatenates a float tensor of all replicas, with gradients.

        Args:
            what: String that names the meeting in errors.
            value: Float tensor with at least one axis.
            axis: Integer, the axis to concatenate along; sizes may differ
                there.
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
        # A sum of tensors padded with zeros, because `all_sum` has gradients.
        return self.all_sum(what, ops.pad(value, padding))


class ReplicaRunner(ABC):
    """A runner of replicas, which also sums their gradients."""

    @abstractmethod
    def call(self, fn: Callable[[Replica], T]) -> list[T]:
        """Calls `fn(replica)` once for each replica, on its device.

        Args:
            fn: Callable. May use the replica's meetings. Each replica's `share`
                is the whole, so that sums over replicas have no weights.

        Returns:
            List of its results, replica 0 first.

        Raises:
            BaseException: The error of the first replica that failed, with a
                note that names the replica, once all the others have unwound.
        """

    @abstractmethod
    def weighted_sum(
        self, gradients: Sequence[Sequence[Any]], weights: Sequence[Any]
    ) -> list[Any]:
        """Sums gradients over all replicas, in as few collectives as possible.

        Args:
            gradients: For each local replica, its gradients, `None` where there
                is none.
            weights: For each local replica, a float or float scalar tensor.

        Returns:
            List with a gradient for each variable, `None` where no replica has
            one.
        """

    def sum_gradients(
        self,
        replica: Replica,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        variables: Sequence[keras.Variable],
    ) -> list[Any]:
        """Sums gradients as `weighted_sum` does, in a meeting of a step.

        Args:
            replica: One of the step's replicas.
            gradients: As for `weighted_sum`.
            weights: As for `weighted_sum`.
            variables: Sequence of the gradients' variables.

        Returns:
            As `weighted_sum`.
        """
        return self.weighted_sum(gradients, weights)

    def updating(
        self, optimizer: keras.optimizers.Optimizer
    ) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which an optimizer applies summed gradients.

        Args:
            optimizer: A `keras.optimizers.Optimizer`.
        """
        return contextlib.nullcontext()

    def probing(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context to call a layer again in, without gradients.

        Computation inside runs at once, so that results have values.
        """
        return contextlib.nullcontext()

    def building(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context to make variables in, in the middle of a step."""
        return contextlib.nullcontext()


class StepRunner(ReplicaRunner):
    """A runner of the steps of `fit` on replicas."""

    # Whether a step is traced, so that its batch may have no values yet.
    traces_steps = False

    @abstractmethod
    def run(
        self,
        fn: Callable[[Replica, Any], T],
        batch: Any,
        is_whole: bool = False,
    ) -> list[T]:
        """Splits a global batch and calls `fn(replica, part)` on each replica.

        Args:
            fn: Callable. May use the replica's meetings.
            batch: Nested structure of arrays, rows along axis 0. Each replica
                gets all of the leaves without rows.
            is_whole: Boolean, whether the first replica gets all rows.

        Returns:
            List of the replicas' results, replica 0 first. Replicas without
            rows may be left out.
        """

    def rehearsing(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context to call a step in without side effects."""
        return contextlib.nullcontext()


class OnlyReplica(Replica):
    """The identity: a single replica, which meets no others.

    `outside` returns a context manager in which the thread runs no replica.
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

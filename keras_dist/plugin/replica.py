"""One replica while it runs: how it meets the others, and its variables."""

import contextlib
import functools
import operator
from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any
from typing import TypeVar

import keras
from keras import ops

from keras_dist.core.nests import select
from keras_dist.core.plan import Plan
from keras_dist.core.reduction import check_gather
from keras_dist.core.reduction import check_shapes
from keras_dist.core.rows import WHOLE
from keras_dist.core.rows import RowShard
from keras_dist.core.rows import scaled
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.internals.keras_internals import in_tf_graph
from keras_dist.plugin.draws import Draw
from keras_dist.plugin.draws import draw_by_size
from keras_dist.plugin.workers import Workers

T = TypeVar("T")
# Odd and large: seeds of different replicas stay apart while counters grow.
SEED_STRIDE = 0x2545F491


def divergence(places: Sequence[str | None]) -> ReplicaDivergenceError:
    """Returns the error of replicas at different places, `None` for ended."""
    where = "; ".join(
        f"replica {index} had already ended"
        if place is None
        else f"replica {index} at {place}"
        for index, place in enumerate(places)
    )
    return ReplicaDivergenceError(
        f"Replicas took different paths, so some would wait forever: {where}.\n"
        "Some replicas made a different number of "
        "replica_context().merge_call() calls, or of other calls at which "
        "replicas wait for each other. Expected: the same losses, metrics, "
        "updates, batch statistics, collectives and assignments in the same "
        "order on each replica. Look for a branch on values that differ "
        "between replicas."
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
    """The workers that take part in a step, and each one's rows."""

    workers: Workers | None = None
    first: int = 0  # of this worker's replicas, among all
    shares: tuple[RowShard, ...] = ()  # of each worker
    # What replicas have assigned alike, by variable.
    agreed: dict[int, Any] = field(default_factory=dict, compare=False)


ALONE = ReplicaGroup()


def group_of(
    plan: Plan, workers: Workers | None, edges: Sequence[Any]
) -> ReplicaGroup:
    """Returns a step's workers and their rows, given all shares' edges."""
    if workers is None:
        return ReplicaGroup()
    num_local = plan.num_local_replicas
    ends = edges[::num_local]
    shares = tuple(
        RowShard(stop - start, edges[-1])
        for start, stop in zip(ends[:-1], ends[1:], strict=True)
    )
    return ReplicaGroup(workers, plan.first_replica, shares)


class Replica(ABC):
    """One replica while it runs one step.

    Args:
        index: Integer, its position among the replicas of this worker.
        share: `RowShard`, its rows of the step's batch.
        group: `ReplicaGroup`, the workers that this one is among.
    """

    # False if it reads variables themselves, which may change under it.
    has_copies = True
    # True if its worker runs no other replica at the same time.
    is_only = False

    def __init__(
        self, index: int, share: RowShard, group: ReplicaGroup = ALONE
    ) -> None:
        self.index = index
        self.share = share
        self.group = group

    @property
    def id(self) -> int:
        """The replica's position among the replicas of all workers."""
        return self.group.first + self.index

    @abstractmethod
    def rendezvous(
        self, what: str, fn: Callable[[list[Any]], T], value: object
    ) -> T:
        """Waits for this worker's replicas, then returns `fn(values)` to all.

        Args:
            what: String that names the rendezvous in errors. Replicas that meet
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

    def all_sum(self, what: str, value: object, total: object = None) -> Any:
        """Sums a float tensor over all replicas, with gradients.

        When the step's gradients are summed, they are weighted by each
        replica's `share.weight`. So the backward pass here uses the same
        weights: replica `r` gets `sum_q weight_q * dy_q / weight_r`.

        By default, replicas meet in the forward and in the backward pass. That
        is for a framework that runs `keras.ops.custom_gradient` as it is, and
        does not trace it, as JAX does.

        Args:
            what: String that names the rendezvous in errors.
            value: Float tensor of the same shape on each replica.
            total: The sum, if it is known already: then replicas meet in the
                backward pass only.

        Returns:
            Tensor of that shape, equal on each replica.
        """
        if total is None:
            total = self.all_reduce(what, ops.stop_gradient(value))

        # The total is an argument, so that TensorFlow does not look for
        # variables in what the other replicas computed it from.
        def tied(
            local_value: object, total: object
        ) -> tuple[Any, Callable[..., Any]]:
            def backward(
                *args: Any, upstream: object = None
            ) -> tuple[Any, None]:
                # PyTorch passes it by name, after the inputs.
                gradient = args[-1] if upstream is None else upstream
                weighted = scaled(self.share.keep(gradient), self.share.weight)
                # Not `all_reduce`: second derivatives pass here too.
                summed = self.all_sum(f"the gradient of {what}", weighted)
                return scaled(summed, self.share.inverse), None

            # A tensor for each replica, which gets a gradient of its own.
            return ops.copy(total), backward

        return ops.custom_gradient(tied)(value, total)

    def all_reduce(self, what: str, value: object) -> Any:
        """Sums an integer or a tensor over all replicas, without gradients.

        Args:
            what: String that names the rendezvous in errors.
            value: Integer, or tensor of the same shape on each replica.

        Returns:
            The sum, which replicas may share; in a graph of TensorFlow over
            workers, that of integers is a tensor.
        """

        def add(values: list[Any]) -> Any:
            workers = self.group.workers
            are_integers = [isinstance(term, int) for term in values]
            if all(are_integers):
                return _sum_of_integers(values, workers, what)
            if any(are_integers):
                values = [ops.convert_to_tensor(term) for term in values]
            check_shapes(values)
            local_sum = functools.reduce(
                operator.add, map(self.at_home, values)
            )
            return (
                local_sum
                if workers is None
                else workers.sum([local_sum], what=what)[0]
            )

        return self.rendezvous(what, add, value)

    def at_home(self, value: object) -> Any:
        """Returns a replica's tensor on the device where replicas meet."""
        return value

    @abstractmethod
    def read(self, variable: keras.Variable) -> Any:
        """Returns this replica's value of a variable.

        Args:
            variable: A `keras.Variable`.

        Returns:
            Tensor of the framework, or `None` if the variable has no value yet.
        """

    @abstractmethod
    def hold(self, variable: keras.Variable, value: object) -> Any:
        """Returns a variable's value after this replica's assignment.

        Args:
            variable: A `keras.Variable`.
            value: Tensor that this replica assigned.

        Returns:
            Tensor, or `None` if the replica's own copy was written in place and
            nothing is left to hold.
        """

    def check_rendezvous(self, what: str) -> None:
        """Refuses a rendezvous where the replicas can't meet.

        Args:
            what: String that names the rendezvous in the error.

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

    def check_values(self, model: keras.Model, values: dict[int, Any]) -> None:
        """Refuses values of variables that were changed in place.

        Args:
            model: The `keras.Model` whose step runs.
            values: Dict from the `id` of a variable to what was read of it, or
                assigned.
        """

    def committed(self) -> None:
        """Called when values written in place are every replica's."""

    @property
    def seed_offset(self) -> Any:
        """The offset of this replica's seeds: below 2**31, 0 on the first."""
        return (self.id * SEED_STRIDE) % 2**31

    def draw(self, draw: Draw) -> Any:
        """Returns this replica's rows of a random draw for the global batch.

        Args:
            draw: `keras_dist.plugin.draws.Draw`, a call in a step of `fit`.
        """
        return draw_by_size(draw, self.share, self.parameters_of_all)

    def parameters_of_all(self, value: Any, axis: int) -> Any:
        """Gathers a parameter of a draw that has a value for each row.

        Args:
            value: Array or tensor, own rows along the axis.
            axis: Integer.
        """
        value = ops.stop_gradient(ops.convert_to_tensor(value))
        if not self.share.rows:
            value = value[(*[slice(None)] * axis, slice(0))]
        exact = ops.cast(value, "float64")
        every = self.all_gather("the parameters of a random draw", exact, axis)
        return ops.cast(ops.stop_gradient(every), value.dtype)

    def components_of(self, nest: object) -> Any:
        """Returns this replica's view of a nest: its component of each value.

        Args:
            nest: Nest of values, `PerReplica` ones among them.
        """
        return select(self.index, nest)

    def all_gather(self, what: str, value: Any, axis: int) -> Any:
        """Concatenates a float tensor of all replicas, with gradients.

        Args:
            what: String that names the rendezvous in errors.
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

        along, sizes = self.rendezvous(what, sizes_of, ops.stop_gradient(value))
        before = sum(sizes[: self.id])
        after = sum(sizes[self.id + 1 :])
        padding = [(0, 0)] * len(value.shape)
        padding[along] = (before, after)
        # A sum of tensors padded with zeros, because `all_sum` has gradients.
        return self.all_sum(what, ops.pad(value, padding))


def _sum_of_integers(
    values: list[int], workers: Workers | None, what: str
) -> Any:
    if workers is None:
        return sum(values)
    if in_tf_graph():
        return workers.sum([ops.convert_to_tensor(sum(values))], what=what)[0]
    return sum(workers.concatenate_numbers(values, what))


class OnlyReplica(Replica):
    """A single replica, which meets no others."""

    def __init__(
        self, outside: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> None:
        super().__init__(0, WHOLE)
        self._outside = outside

    def rendezvous(
        self, what: str, fn: Callable[[list[Any]], T], value: object
    ) -> T:
        with self._outside():
            return fn([value])

    def all_sum(self, what: str, value: object, total: object = None) -> Any:
        return value

    def read(self, variable: keras.Variable) -> Any:
        return variable.value

    def hold(self, variable: keras.Variable, value: object) -> Any:
        variable.assign(value)
        return None

"""What one replica reads and writes while it runs, and its meetings."""

import contextlib
import functools
import operator
import threading
from abc import ABC
from abc import abstractmethod
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any
from typing import Self

import keras
from keras import ops

from keras_dist.core import context
from keras_dist.core.rows import Share
from keras_dist.errors import MetricMergeError
from keras_dist.internals import keras_internals
from keras_dist.plugin.replica import Replica
from keras_dist.plugin.replica import ReplicaRunner
from keras_dist.replica.exchange import Entry
from keras_dist.replica.exchange import with_other_workers
from keras_dist.replica.join import Combine
from keras_dist.replica.join import is_float
from keras_dist.replica.join import mean_over_rows
from keras_dist.replica.join import sum_over_rows
from keras_dist.replica.sums import Kind
from keras_dist.replica.writes import Writes as Writes
from keras_dist.replica.writes import by_variable
from keras_dist.replica.writes import check_integers
from keras_dist.replica.writes import totals

if TYPE_CHECKING:
    from keras_dist.replica.kinds import Kinds
    from keras_dist.replica.strategy_core import StrategyBase


class _Current(threading.local):
    step: "ReplicaStep | None" = None
    call: "ReplicaState | None" = None


_current = _Current()


def current_step() -> "ReplicaStep | None":
    """The step this thread runs a replica of, or `None`.

    `None` too while a replica works on gathered rows (`ReplicaStep.alone`):
    what happens then is what happens on one device.
    """
    return _current.step


def current_call() -> "ReplicaState | None":
    """The replica function (under `strategy.run`) of this thread, if any."""
    return _current.call


def set_current_call(call: "ReplicaState | None") -> None:
    """Makes a replica function this thread's."""
    _current.call = call


def current_replica() -> "ReplicaState | None":
    """The replica this thread runs, of a step or of a function, or `None`."""
    return _current.step or _current.call


@contextlib.contextmanager
def outside_replicas(
    state: "ReplicaState | None" = None,
) -> Iterator[None]:
    """Suspends this thread's replica: cross-replica context, real state.

    Args:
        state: The replica that is suspended, where this thread runs none
            itself.
    """
    step, call = _current.step, _current.call
    _current.step = _current.call = None
    scope = keras_internals.set_stateless_scope(None)
    try:
        with contextlib.ExitStack() as stack:
            state = step or call or state
            if state is not None:
                stack.enter_context(context.in_replica(None))
                stack.enter_context(context.entered(state.strategy))
            yield
    finally:
        keras_internals.set_stateless_scope(scope)
        _current.step, _current.call = step, call


class ReplicaScope(keras.StatelessScope):
    """Reads a replica's variables and keeps its writes to itself."""

    def __init__(self, state: "ReplicaState") -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self._state = state
        # Losses that left `losses` live on until the step ends: layers know
        # theirs by `id`, which must not be given to another one.
        self.cleared_losses: list[Any] = []

    def get_current_value(self, variable: keras.Variable) -> Any:
        value = self.state_mapping.get(id(variable))
        if value is None:
            value = self._state.read(variable)
            if value is not None:
                self.state_mapping[id(variable)] = value
        return value

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        self._state.write(*update)

    def forget(self) -> None:
        """Drops every value that the scope holds."""
        self.state_mapping.clear()
        self.losses.clear()
        self.cleared_losses.clear()


class ReplicaState(ABC):
    """What one replica reads and writes while it runs; a context manager.

    Args:
        replica: The executor's `Replica`.
        runner: The executor's `ReplicaRunner`.
        strategy: The `Strategy` that runs it.

    Attributes:
        scope: The `ReplicaScope` that variables are read through.
        writes: Dict of the variables that this replica has assigned.
    """

    # Whether nothing of what it does is to be kept.
    is_rehearsal = False

    def __init__(
        self, replica: Replica, runner: ReplicaRunner, strategy: "StrategyBase"
    ) -> None:
        self.replica = replica
        self.runner = runner
        self.strategy = strategy
        self.scope = ReplicaScope(self)
        self.writes: Writes = {}

    @property
    def share(self) -> Share:
        """This replica's rows."""
        return self.replica.share

    def __enter__(self) -> Self:
        self._exits = contextlib.ExitStack()
        self._exits.enter_context(self._entered())
        before = keras_internals.set_stateless_scope(self.scope)
        self._exits.callback(keras_internals.set_stateless_scope, before)
        return self

    def __exit__(self, *error: object) -> None:
        self._exits.close()
        # The scope refers back to this object: free its tensors now.
        self.scope.forget()
        self.writes = {}

    @abstractmethod
    def _entered(self) -> contextlib.AbstractContextManager[None]:
        """Makes this the thread's current replica."""

    def check(self, writes: Sequence[Writes]) -> None:
        """Raises if replicas have assigned what can't be joined.

        Called in a meeting, once, before the meeting changes anything.

        Args:
            writes: For each replica, what it has assigned.
        """

    @abstractmethod
    def commit(self, writes: Sequence[Writes], shares: Sequence[Share]) -> None:
        """Gives variables the values that the replicas assigned.

        Called in a meeting, once.

        Args:
            writes: For each replica, what it has assigned.
            shares: For each replica, its rows.
        """

    def read(self, variable: keras.Variable) -> Any:
        """This replica's value of a variable that it has not assigned."""
        return self.replica.read(variable)

    @abstractmethod
    def write(self, variable: keras.Variable, value: Any) -> None:
        """Keeps a value that this replica assigned to a variable."""

    def sum_gradients(
        self,
        gradients: Sequence[Sequence[Any]],
        shares: Sequence[Share],
        variables: Sequence[keras.Variable],
    ) -> list[Any]:
        """Sums gradients over replicas, weighted by their shares.

        Called in a meeting, once.

        Args:
            gradients: For each replica, its gradients or `None`s.
            shares: For each replica, its rows.
            variables: Sequence of the variables that they belong to.
        """
        weights = [share.weight for share in shares]
        return self.runner.sum_gradients(
            self.replica, gradients, weights, variables
        )

    def total(self, what: str, value: Any) -> Any:
        """The sum over all replicas of a number, or of a tensor.

        Args:
            what: String that names the meeting in errors.
            value: Number, or tensor of one shape on each replica. No
                gradients flow.
        """

        def add(values: list[Any]) -> Any:
            own = functools.reduce(operator.add, values)
            workers = self.replica.group.workers
            if workers is None:
                return own
            total = workers.sum([ops.convert_to_tensor(own)])[0]
            if isinstance(own, int) and not keras_internals.in_tf_graph():
                return int(total)
            return total

        return self.replica.meet(what, add, value)

    def of_its_own(self, values: list[Any]) -> list[Any]:
        """A list of tensors, as it is passed to a meeting that sums them."""
        return values

    def same_on_all(self, variables: Sequence[keras.Variable]) -> None:
        """Notes that each replica gives variables the same values."""

    def check_owners(self, variables: Sequence[keras.Variable]) -> None:
        """Refuses to update variables of another strategy, or does nothing."""

    def check_trained(self, variables: Sequence[keras.Variable]) -> None:
        """Refuses to train variables of no strategy, or does nothing."""

    def forget(self, variables: Iterable[keras.Variable]) -> None:
        """Reads variables anew, because a meeting has changed them."""
        for variable in variables:
            self.scope.state_mapping.pop(id(variable), None)


class ReplicaStep(ReplicaState):
    """One replica's part of one step of `fit` or a relative.

    Args:
        replica: As for `ReplicaState`.
        runner: As for `ReplicaState`.
        strategy: As for `ReplicaState`.
        kinds: The model's `Kinds`.

    Attributes:
        alike: Set of the ids of variables that every replica gives the same
            value.
        updates: List of the metric updates that replicas have not met for.
        results: By its id, each tensor that is the same on every replica.
        has_global_rows: Boolean, whether a loss gave it a value for each row
            of the global batch.
        terms_seen: By layer and training, how many losses were added.
        counts_losses: Boolean, whether losses that layers add make any
            difference.
        looks_at_gradients: Boolean, whether it remembers what its gradients
            are when they come.
    """

    def __init__(
        self,
        replica: Replica,
        runner: ReplicaRunner,
        strategy: "StrategyBase",
        kinds: "Kinds",
    ) -> None:
        super().__init__(replica, runner, strategy)
        self.kinds = kinds
        self.looks_at_gradients = kinds.looks_at_gradients
        self.alike: set[int] = set()
        self.updates: list[Any] = []
        self.results: dict[int, Any] = {}
        self.has_global_rows = False
        self.terms_seen: dict[Any, int] = {}
        self.counts_losses = True

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        with context.in_replica(self.strategy):
            _current.step = self
            try:
                yield
            finally:
                _current.step = None

    def check(self, writes: Sequence[Writes]) -> None:
        for variable, values, _ in by_variable(writes, writes):
            if variable.synchronization == "on_read":
                raise MetricMergeError(
                    f"Metric state '{variable.path}' was changed on several "
                    "replicas by a metric that the model does not know, so "
                    "its updates were not gathered. Make the metric an "
                    "attribute of the model or pass it to `compile`."
                )
            if not self._is_sum(variable):
                check_integers(variable, values)

    def commit(self, writes: Sequence[Writes], shares: Sequence[Share]) -> None:
        # All of them first: one that is refused leaves all as they were.
        self.check(writes)
        given = list(by_variable(writes, shares))
        sums = [g for g in given if self._is_sum(g[0])]
        means = [
            g
            for g in given
            if id(g[0]) not in self.alike and not self._is_sum(g[0])
        ]
        changed = totals(sums, self.replica.group.workers) if sums else []
        changed += self.means([(values, of) for _, values, of in means])
        values_of = {
            id(variable): value
            for (variable, _, _), value in zip(
                [*sums, *means], changed, strict=True
            )
        }
        for variable, values, _ in given:
            variable.assign(values_of.get(id(variable), values[0]))

    def _is_sum(self, variable: Any) -> bool:
        kind = self.kinds.variables.get(id(variable))
        return kind is Kind.SUM and not variable.trainable

    def write(self, variable: keras.Variable, value: Any) -> None:
        key = id(variable)
        if key not in self.alike and key not in self.kinds.variables:
            self.kinds.learn_variable(self, variable)
        held = self.replica.hold(variable, value)
        if held is not None:
            self.scope.state_mapping[key] = held
            self.writes[key] = (variable, held)

    def means(
        self, given: Sequence[tuple[list[Any], list[Share]]]
    ) -> list[Any]:
        """Means over the rows of all replicas, in one collective at most.

        Args:
            given: Sequence with, for each value, what local replicas have,
                and their shares.

        Returns:
            List with the mean of each value; of what is no float, the first
            replica's value.
        """
        workers = self.replica.group.workers
        if workers is None:
            return [mean_over_rows(values, shares) for values, shares in given]
        floats = [g for g in given if is_float(g[0][0])]
        parts = [sum_over_rows(values, shares) for values, shares in floats]
        totals = iter(workers.sum(parts) if parts else [])
        return [
            next(totals) if is_float(values[0]) else values[0]
            for values, _ in given
        ]

    def same_on_all(self, variables: Sequence[keras.Variable]) -> None:
        self.alike.update(map(id, variables))

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Runs replica code on gathered rows, as one device would."""
        _current.step = None
        try:
            yield
        finally:
            _current.step = self

    def exchange(
        self,
        own: list[Entry],
        combine: Combine = mean_over_rows,
        alike: bool = False,
    ) -> list[Entry]:
        """The entries of all replicas, of those of this worker.

        Called in a meeting. No gradients flow.

        Args:
            own: List with the `Entry` of each local replica.
            combine: Callable for values without rows.
            alike: Boolean, whether all workers get the very same.
        """
        return with_other_workers(self.replica.group, own, combine, alike)

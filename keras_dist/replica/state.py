"""The state of one replica while it runs: what it reads and assigns."""

import contextlib
import threading
from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import Self

import keras

from keras_dist.core import context
from keras_dist.core.context import replaced
from keras_dist.core.rows import RowShard
from keras_dist.errors import UnsupportedModelError
from keras_dist.internals.keras_internals import opened
from keras_dist.internals.keras_internals import set_stateless_scope
from keras_dist.plugin.replica import Replica
from keras_dist.plugin.runner import ReplicaRunner
from keras_dist.replica import assigned
from keras_dist.replica.assigned import Assigned
from keras_dist.replica.exchange import Combine
from keras_dist.replica.exchange import Entry
from keras_dist.replica.exchange import check_other_axes
from keras_dist.replica.exchange import mean_over_rows
from keras_dist.replica.exchange import with_other_workers
from keras_dist.replica.handed import Handed
from keras_dist.replica.handed import sizes_of
from keras_dist.replica.strategy_core import StrategyBase


class _ReplicaOfThread(threading.local):
    # PyTorch 2.11 would trace a class attribute in place of the thread's own.
    def __init__(self) -> None:
        # A `CompiledStep`, too.
        self.step: Any = None
        self.call: ReplicaState | None = None


# For code that each step runs very often, in place of the functions below.
of_thread = _ReplicaOfThread()
# By the id of a variable: it, and what a replica gave it.
Writes = dict[int, Any]


def current_step() -> Any:
    """Returns the step of which this thread runs a replica, or `None`."""
    return of_thread.step


def current_call() -> "ReplicaState | None":
    """Returns this thread's state in a replica function, or `None`."""
    return of_thread.call


def calling(call: "ReplicaState") -> contextlib.AbstractContextManager[None]:
    """Makes a state this thread's, of a replica function, in the context."""
    return replaced(of_thread, call=call)


def current_replica() -> Any:
    """Returns the state of the replica that this thread runs, or `None`."""
    return of_thread.step or of_thread.call


class outside_replicas(contextlib.AbstractContextManager[None]):
    """Suspends this thread's replica, in cross-replica context.

    Variables are read and written directly inside. `state` is the replica's,
    if this thread runs no replica itself. A class, as it is entered often.
    """

    def __init__(self, state: "ReplicaState | None" = None) -> None:
        self._state = state

    def __enter__(self) -> None:
        before = self._before = of_thread.step, of_thread.call
        state = before[0] or before[1] or self._state
        of_thread.step = of_thread.call = None
        self._scope = set_stateless_scope(None)
        self._apart = context.cross_replica(state.strategy) if state else None
        try:
            if self._apart is not None:
                self._apart.__enter__()
        except BaseException:  # Ctrl-C
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        if self._apart is not None:
            self._apart.__exit__(None, None, None)
        set_stateless_scope(self._scope)
        of_thread.step, of_thread.call = self._before


class LayerScope(keras.StatelessScope):
    """A scope in which layers add losses, and clear their own."""

    def __init__(self) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        # Losses removed from `losses` live on until the scope ends: layers know
        # theirs by `id`, which no other loss must get meanwhile.
        self._cleared_losses: list[Any] = []

    def clear_losses(self, layer: keras.Layer) -> None:
        """Clears a layer's losses, as `Layer._clear_losses`, in this scope."""
        if self.losses:
            ids = {
                i
                for sublayer in layer._flatten_layers()
                for i in sublayer._loss_ids
            }
            self._cleared_losses += [x for x in self.losses if id(x) in ids]
            self.losses[:] = [x for x in self.losses if id(x) not in ids]

    def release(self) -> None:
        """Drops all values and losses that the scope holds."""
        self.state_mapping.clear()
        self.losses.clear()
        self._cleared_losses.clear()


class ReplicaScope(LayerScope):
    """The scope through which a replica reads and assigns variables."""

    def __init__(self, state: "ReplicaState") -> None:
        super().__init__()
        self._state = state
        # What is called for a variable that was not read before.
        self.read: Callable[[keras.Variable], Any] = state.read

    def get_current_value(self, variable: keras.Variable) -> Any:
        value = self.state_mapping.get(id(variable))
        if value is None:
            value = self.read(variable)
            if value is not None and self._state.replica.has_copies:
                self.state_mapping[id(variable)] = value
        return value

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        self._state.write(*update)


class ReplicaState(ABC):
    """One replica's reads and writes while it runs; a context manager."""

    is_compiled = False
    # Whether nothing follows the update by an optimizer but Keras' metrics.
    ends_with_metrics = False
    # Whether that update was made, or waits.
    is_ending = False
    # That update, while it waits for metrics, to meet others but once.
    waiting: Callable[[], None] | None = None
    # Metric updates that wait for the next rendezvous.
    updates: Sequence[Any] = ()

    def __init__(
        self, replica: Replica, runner: ReplicaRunner, strategy: StrategyBase
    ) -> None:
        self.replica = replica
        self.runner = runner
        self.strategy = strategy
        self.scope = ReplicaScope(self)
        self.writes: Writes = {}
        # Ids of those that were assigned and not only added to.
        self.set_anew: set[int] = set()

    @property
    def share(self) -> RowShard:
        """This replica's rows."""
        return self.replica.share

    def __enter__(self) -> Self:
        self._exits = contextlib.ExitStack()
        self._exits.enter_context(self._entered())
        self._exits.enter_context(opened(self.scope))
        return self

    def __exit__(self, *error: object) -> None:
        self._exits.close()
        # The scope refers back to this object: free its tensors now.
        self.scope.release()
        self.writes = {}

    @abstractmethod
    def _entered(self) -> contextlib.AbstractContextManager[None]:
        """Makes this replica the thread's current one."""

    def check(
        self, writes: Sequence[Writes], shares: Sequence[RowShard]
    ) -> None:
        """Raises an error if replicas' assignments can't be combined."""

    @abstractmethod
    def commit(
        self, writes: Sequence[Writes], shares: Sequence[RowShard]
    ) -> None:
        """Gives variables the values that the replicas assigned."""

    def read(self, variable: keras.Variable) -> Any:
        """Returns this replica's value of a variable that it didn't assign."""
        return self.replica.read(variable)

    @abstractmethod
    def write(self, variable: keras.Variable, value: object) -> None:
        """Keeps a value that this replica assigned to a variable."""

    def sum_gradients(
        self,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        variables: Sequence[keras.Variable],
        numbers: Sequence[Any] = (),
    ) -> list[Any]:
        """Sums gradients over replicas, weighted by replica, and this worker's
        part of numbers over workers; called at a rendezvous."""
        # A runner that carries none need not know of numbers.
        extra = (numbers,) if numbers else ()
        return self.runner.sum_gradients(
            self.replica, gradients, weights, variables, *extra
        )

    def of_its_own(self, values: list[Any]) -> list[Any]:
        """Marks tensors as this replica's own, which a rendezvous adds up."""
        return values

    def same_on_all(self, variables: Sequence[keras.Variable]) -> None:
        """Notes variables that each replica gives the same values."""

    def check_update(
        self,
        changed: Sequence[keras.Variable],
        trained: Sequence[keras.Variable],
    ) -> None:
        """Refuses variables of others to change, or of none to train."""

    def forget(self, variables: Iterable[keras.Variable]) -> None:
        """Has variables read again, because a rendezvous has changed them."""
        for variable in variables:
            self.scope.state_mapping.pop(id(variable), None)


class CompiledStep(contextlib.AbstractContextManager[None]):
    """The step of a worker's only replica, while a compiler traces it.

    Hooks find it in place of a `ReplicaStep`, of which it has what a graph
    needs. Variables are read and assigned as outside of a step.
    """

    is_compiled = True
    counts_losses = True

    def __init__(self, replica: Replica, strategy: StrategyBase) -> None:
        self.replica, self.strategy = replica, strategy
        self.share = replica.share
        # What metrics add to their variables, while that is noted.
        self.additions: list[tuple[keras.Variable, Any]] | None = None
        # Whether the optimizer and metrics assign their variables.
        self.is_updating = False
        # The variables that a layer is about to give the same values on each
        # replica.
        self._alike: Sequence[keras.Variable] = ()

    def __enter__(self) -> None:
        self.is_updating = False
        self._exits = contextlib.ExitStack()
        self._exits.enter_context(context.in_replica(self.strategy))
        self._exits.enter_context(replaced(of_thread, step=self))

    def __exit__(self, *error: object) -> None:
        self._exits.close()
        self.additions = None

    def same_on_all(self, variables: Sequence[keras.Variable]) -> None:
        self._alike = variables

    def check_assigned(self, variable: keras.Variable) -> None:
        """Refuses values that may differ between replicas."""
        if self.is_updating:
            return
        for known in self._alike:
            if variable is known:
                return
        raise UnsupportedModelError(
            f"A compiled step assigns variable '{variable.path}', which steps "
            "did not do before it was compiled. Workers have compared none of "
            "its values. Expected: steps that all do the same. Pass "
            "`jit_compile=False` to `compile`."
        )


class ReplicaStep(ReplicaState):
    """One replica's part of one step of `fit` or a relative."""

    def __init__(
        self,
        replica: Replica,
        runner: ReplicaRunner,
        strategy: StrategyBase,
        model: keras.Model,
        handed: Handed,
    ) -> None:
        super().__init__(replica, runner, strategy)
        self.scope.read = replica.read
        self.model = model
        self.handed = handed
        # How often something was handed over.
        self._places: dict[str, int] = {}
        # Ids of variables that every replica gives the same value.
        self.alike: set[int] = set()
        self.updates: list[Any] = []
        # What a metric adds to its variables, while that is noted.
        self.additions: list[tuple[keras.Variable, Any]] | None = None
        # By id, tensors that are the same on every replica.
        self.results: dict[int, Any] = {}
        # Whether a loss returned a value for each row of the global batch.
        self.has_global_rows = False
        self.counts_losses = True
        # Whether what was assigned before has been committed.
        self.has_ended = False

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        with context.in_replica(self.strategy), replaced(of_thread, step=self):
            yield

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        # Autograd may keep this object, and the model what autograd has.
        del self.model

    def check(
        self, writes: Sequence[Writes], shares: Sequence[RowShard]
    ) -> None:
        if any(writes):
            known = self.replica.group.agreed
            executor = self.strategy.executor
            assigned.check(writes, shares, self.alike, executor, known)

    def commit(
        self, writes: Sequence[Writes], shares: Sequence[RowShard]
    ) -> None:
        if not any(writes):
            return
        executor = self.strategy.executor
        # Found before any assignment, so that an error changes no variable.
        known = self.replica.group.agreed
        new_values = assigned.combined(
            writes, shares, self.alike, executor, known
        )
        for variable, value in new_values:
            variable.assign(value)

    def write(self, variable: keras.Variable, value: object) -> None:
        key = id(variable)
        stored = self.replica.hold(variable, value)
        if stored is not None:
            self.scope.state_mapping[key] = stored
            adds = key not in self.set_anew
            self.writes[key] = Assigned(variable, stored, adds)

    def same_on_all(self, variables: Sequence[keras.Variable]) -> None:
        self.alike.update(map(id, variables))

    def have_rows(self, what: str, everyone: Sequence[Entry]) -> list[bool]:
        """Returns which leaves of replicas have rows, at a rendezvous."""
        sizes = [(sizes_of(leaves), share) for leaves, share in everyone]
        workers = self.replica.group.workers
        have_rows = self.handed.have_rows(what, sizes, workers)
        for place, has_rows in enumerate(have_rows):
            parts = [leaves[place] for leaves, _ in everyone]
            if has_rows and len(parts[0].shape) > 1:
                executor = self.strategy.executor
                checked = check_other_axes(what, parts, executor)
                for (leaves, _), part in zip(everyone, checked, strict=True):
                    leaves[place] = part
        return have_rows

    def place(self, what: str) -> str:
        """Returns a name for what a step hands over, unique in the step."""
        count = self._places[what] = self._places.get(what, 0) + 1
        return f"{what} ({count})"

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Has code inside run on gathered rows, as on one device."""
        return replaced(of_thread, step=None)

    def exchange(
        self,
        local_entries: list[Entry],
        combine: Combine = mean_over_rows,
        alike: bool = False,
    ) -> list[Entry]:
        """Returns the entries of all replicas, as `with_other_workers`."""
        return with_other_workers(
            self.replica.group, local_entries, combine, alike
        )

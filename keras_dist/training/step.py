"""ReplicaStep: the state of one replica in one step, and its meetings."""

import contextlib
import threading
from collections.abc import Iterable
from collections.abc import Iterator
from typing import TYPE_CHECKING
from typing import Any
from typing import TypeVar

import keras

from keras_dist import context
from keras_dist.training import keras_internals
from keras_dist.training.replica import Replica
from keras_dist.training.replica import ReplicaRunner
from keras_dist.training.shares import Share

if TYPE_CHECKING:
    from keras_dist.strategy import Strategy

T = TypeVar("T")
# By the variable's id: the variable, and the value that it was given.
Writes = dict[int, tuple[Any, Any]]


class _Current(threading.local):
    step: "ReplicaStep | None" = None


_current = _Current()


def current_step() -> "ReplicaStep | None":
    """The step this thread runs a replica of, or `None`.

    `None` too while a replica works on gathered rows (`ReplicaStep.alone`):
    what happens then is what happens on one device.
    """
    return _current.step


@contextlib.contextmanager
def outside_replicas() -> Iterator[None]:
    """Suspends this thread's replica: cross-replica context, real state."""
    step, _current.step = _current.step, None
    scope = keras_internals.set_stateless_scope(None)
    try:
        with contextlib.ExitStack() as stack:
            if step is not None:
                stack.enter_context(context.in_replica(None))
                stack.enter_context(context.entered(step.strategy))
            yield
    finally:
        keras_internals.set_stateless_scope(scope)
        _current.step = step


class ReplicaScope(keras.StatelessScope):
    """Reads a replica's variables and keeps its writes to itself."""

    def __init__(self, step: "ReplicaStep") -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self._step = step
        # Losses that left `losses` live on until the step ends: layers know
        # theirs by `id`, which must not be given to another one.
        self.cleared_losses: list[Any] = []

    def get_current_value(self, variable: keras.Variable) -> Any:
        value = self.state_mapping.get(id(variable))
        if value is None:
            value = self._step.replica.read(variable)
            if value is not None:
                self.state_mapping[id(variable)] = value
        return value

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        held = self._step.replica.hold(variable, value)
        if held is not None:
            self.state_mapping[id(variable)] = held
            self._step.writes[id(variable)] = (variable, held)

    def forget(self) -> None:
        """Drops every value that the scope holds."""
        self.state_mapping.clear()
        self.losses.clear()
        self.cleared_losses.clear()


class ReplicaStep:
    """One replica's part of one step; a context manager.

    Args:
        replica: The executor's `Replica`.
        runner: The executor's `ReplicaRunner`.
        strategy: The `Strategy` that runs the step.

    Attributes:
        scope: The `ReplicaScope` that variables are read through.
        writes: Dict of the variables that this replica has assigned.
    """

    def __init__(
        self, replica: Replica, runner: ReplicaRunner, strategy: "Strategy"
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

    def __enter__(self) -> "ReplicaStep":
        self._exits = contextlib.ExitStack()
        self._exits.enter_context(context.in_replica(self.strategy))
        before = keras_internals.set_stateless_scope(self.scope)
        self._exits.callback(keras_internals.set_stateless_scope, before)
        _current.step = self
        return self

    def __exit__(self, *error: object) -> None:
        _current.step = None
        self._exits.close()
        # The scope refers back to this step: free its tensors now.
        self.scope.forget()
        self.writes = {}

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Runs replica code on gathered rows, as one device would."""
        _current.step = None
        try:
            yield
        finally:
            _current.step = self

    def exchange(self, what: str, value: T) -> list[T]:
        """Every replica's `value`, to every replica. No gradients flow."""
        return self.replica.meet(what, list, value)

    def forget(self, variables: Iterable[keras.Variable]) -> None:
        """Reads variables anew, because a meeting has changed them."""
        for variable in variables:
            self.scope.state_mapping.pop(id(variable), None)

"""ReplicaStep: the state of one replica in one step, and its meetings."""

import contextlib
import threading
from collections.abc import Callable
from collections.abc import Iterator
from typing import TYPE_CHECKING
from typing import Any
from typing import TypeVar

import keras
from keras import ops

from keras_dist import context
from keras_dist.errors import MetricMergeError
from keras_dist.training import keras_internals
from keras_dist.training.replica import Replica
from keras_dist.training.replica import ReplicaRunner
from keras_dist.training.shares import Share
from keras_dist.training.shares import scaled

if TYPE_CHECKING:
    from keras_dist.strategy import Strategy

T = TypeVar("T")


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
            self._step.written(variable, held)

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
    """

    def __init__(
        self, replica: Replica, runner: ReplicaRunner, strategy: "Strategy"
    ) -> None:
        self.replica = replica
        self.runner = runner
        self.strategy = strategy
        self.scope = ReplicaScope(self)
        self._writes: dict[int, _Write] = {}
        self._alone = False

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
        self._writes = {}

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Runs replica code on gathered rows, as one device would."""
        _current.step = None
        self._alone = True
        try:
            yield
        finally:
            self._alone = False
            _current.step = self

    def exchange(self, what: str, value: T) -> list[T]:
        """Every replica's `value`, to every replica. No gradients flow."""
        return self.replica.meet(what, list, value)

    def written(self, variable: keras.Variable, value: Any) -> None:
        """Notes that this replica assigned a variable."""
        self._writes[id(variable)] = _Write(variable, value, self._alone)

    def update(
        self, optimizer: Any, apply: Callable[..., Any], grads: Any, to: Any
    ) -> None:
        """Sums gradients over replicas, then updates once.

        Args:
            optimizer: A Keras optimizer.
            apply: Its class' `apply`.
            grads: This replica's gradients.
            to: List of the variables they belong to, or `None`.
        """

        def update(everyone: list[Any]) -> None:
            gradients, shares, writes = zip(*everyone, strict=True)
            # What the forward pass assigned (spectral normalization does)
            # is what the update starts from.
            _commit(writes, shares)
            if not optimizer.built:
                with self.runner.building():
                    optimizer.build(to)
            reduced = self.runner.weighted_sum(
                gradients, [share.weight for share in shares]
            )
            with self.runner.updating(optimizer):
                apply(optimizer, reduced, to)

        trainable = {k: w for k, w in self._writes.items() if w.is_trainable}
        self.replica.meet(
            f"the update by optimizer '{optimizer.name}'",
            update,
            (list(grads), self.share, trainable),
        )
        for key in trainable:
            del self._writes[key]
        # Their values have changed: read them anew.
        for variable in to if to is not None else optimizer.trainable_variables:
            self.scope.state_mapping.pop(id(variable), None)

    def commit(self) -> None:
        """Writes what the replicas assigned in this step to the variables."""

        def commit(everyone: list[Any]) -> None:
            writes, shares = zip(*everyone, strict=True)
            _commit(writes, shares)

        self.replica.meet(
            "the end of the step", commit, (self._writes, self.share)
        )


class _Write:
    def __init__(self, variable: Any, value: Any, gathered: bool) -> None:
        self.variable = variable
        self.value = value
        self.gathered = gathered

    @property
    def is_trainable(self) -> bool:
        return bool(self.variable.trainable)

    @property
    def is_metric_state(self) -> bool:
        return bool(self.variable.synchronization == "on_read")


def _commit(writes: tuple[dict[int, _Write], ...], shares: Any) -> None:
    merged = {key: write for own in writes for key, write in own.items()}
    for key, write in merged.items():
        each = [
            (own[key].value, share)
            for own, share in zip(writes, shares, strict=True)
            if key in own
        ]
        variable = write.variable
        if write.is_metric_state and not write.gathered:
            raise MetricMergeError(
                f"Metric state '{variable.path}' was changed on "
                f"{len(each)} replicas by a metric that the model does not "
                "know, so its updates were not gathered. Make the metric an "
                "attribute of the model or pass it to `compile`."
            )
        variable.assign(_merged(variable, each))


def _merged(variable: keras.Variable, each: list[tuple[Any, Share]]) -> Any:
    first = each[0][0]
    if len(each) == 1 or not keras.backend.is_float_dtype(variable.dtype):
        return first
    # Anchored on the first, so that equal values stay exactly what they are.
    value = first
    for other, share in each[1:]:
        value = value + scaled(share.keep(other - first), share.weight)
    return value


def is_row_shaped(value: Any) -> bool:
    """Whether a value is an array with rows along axis 0."""
    return len(getattr(value, "shape", ())) > 0


def concat_rows(parts: list[Any], shares: list[Share]) -> Any:
    """Joins the replicas' rows in order, leaving out those without any."""
    kept = [
        share.trim(part)
        for part, share in zip(parts, shares, strict=True)
        if not (isinstance(share.rows, int) and share.rows == 0)
    ]
    return kept[0] if len(kept) == 1 else ops.concatenate(kept, axis=0)

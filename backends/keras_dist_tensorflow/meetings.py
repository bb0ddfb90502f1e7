"""Replicas of a step and the meetings where they wait for each other."""

from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Protocol
from typing import TypeVar

import keras
import tensorflow as tf

from keras_dist.core.reduction import check_shapes
from keras_dist.core.rows import WHOLE
from keras_dist.core.rows import Share
from keras_dist.errors import UnsupportedModelError
from keras_dist.plugin.replica import ALONE
from keras_dist.plugin.replica import Replica
from keras_dist.plugin.replica import ReplicaGroup
from keras_dist.plugin.replica import divergence
from keras_dist.replica.state import ReplicaState
from keras_dist.replica.state import current_replica
from keras_dist.replica.state import outside_replicas
from keras_dist_tensorflow import internals
from keras_dist_tensorflow.atomic import Barrier
from keras_dist_tensorflow.variables import components

T = TypeVar("T")


class Meetings(Protocol):
    """The interface through which replicas wait for each other."""

    def meet(
        self, index: int, what: str, fn: Callable[[list[Any]], Any], value: Any
    ) -> Any:
        """Waits for the other replicas; returns `fn(values)`, called once."""


class MeetingRound:
    """One run of a step's replicas under a native `MirroredStrategy`.

    Values pass between replicas through this object rather than through
    TensorFlow: replicas are traced into one graph, one at a time.
    """

    def __init__(self, num_replicas: int) -> None:
        self._arrived: list[tuple[str, Any]] = [("", None)] * num_replicas
        self._result: Any = None
        self._barrier = Barrier()
        # Pairs of a `tf.Variable` that was written in place and its old value.
        self.overwritten: list[tuple[Any, Any]] = []

    def undo(self) -> None:
        """Restores the variables that replicas wrote and did not commit."""
        for native, value in reversed(self.overwritten):
            native.assign(value)

    def places(self) -> list[str | None]:
        """Returns the name of each replica's last meeting, `None` before."""
        return [what or None for what, _ in self._arrived]

    def meet(
        self, index: int, what: str, fn: Callable[[list[Any]], Any], value: Any
    ) -> Any:
        """Waits for the other replicas; returns `fn(values)`, called once."""
        self._arrived[index] = (what, value)
        state = current_replica()

        def hold(native: tf.distribute.Strategy) -> None:
            names = [name for name, _ in self._arrived]
            if len(set(names)) > 1:
                raise divergence(names)
            values = [value for _, value in self._arrived]
            # `merge_call` runs this in the caller's thread, not in a replica's.
            with outside_replicas(state), self._barrier.hold():
                self._result = fn(values)

        tf.distribute.get_replica_context().merge_call(hold)
        return self._result


class TensorFlowReplica(Replica):
    """One replica while its thread traces a step, or runs it eagerly.

    Attributes:
        derivatives: Dict from id to each gradient that a tape returned to it.
    """

    def __init__(
        self,
        index: int,
        share: Share,
        meetings: Meetings,
        group: ReplicaGroup = ALONE,
    ) -> None:
        super().__init__(index, share, group)
        self._meetings = meetings
        self._graph = tf.compat.v1.get_default_graph()
        self.derivatives: dict[int, Any] = {}

    def has_changed(
        self,
        state: ReplicaState,
        gradients: Sequence[Any],
        variables: Sequence[keras.Variable],
    ) -> bool:
        # Without a tape, the origin of gradients is unknown.
        return bool(self.derivatives) and any(
            gradient is not None and id(gradient) not in self.derivatives
            for gradient in gradients
        )

    def meet(self, what: str, fn: Callable[[list[Any]], T], value: Any) -> T:
        self.check_meeting(what)
        result: T = self._meetings.meet(self.index, what, fn, value)
        return result

    def check_meeting(self, what: str) -> None:
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise UnsupportedModelError(
                f"Replicas can't meet for {what} inside of `cond`, "
                "`while_loop`, `scan`, `map`, a recurrent layer's cell or a "
                "`tf.function` of its own: TensorFlow traces those apart. "
                "Expected: losses, metrics, updates and batch normalization "
                "outside of control flow. Move it out, unroll the loop "
                "(`unroll=True` in recurrent layers), compile with "
                "`run_eagerly=True`, or use one device."
            )

    def read(self, variable: keras.Variable) -> Any:
        native = internals.native_variable(variable)
        if native is None:
            raise UnsupportedModelError(
                f"Variable '{variable.path}' was made in the middle of a "
                "step, on one replica. Expected: every layer, metric and "
                "optimizer built before. Build the model before `fit`, with "
                "`model.build(shape)` or by calling it on a batch."
            )
        return native

    def check_write(self, variable: keras.Variable) -> None:
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise UnsupportedModelError(
                f"Variable '{variable.path}' was assigned inside of `cond`, "
                "`while_loop`, `scan`, `map` or a `tf.function` of its own, "
                "which TensorFlow traces apart: the replica can't hold the "
                "value. Expected: assignments, random layers, metrics and "
                "batch normalization in the replica function itself. Wrap "
                "the whole of `strategy.run` in a `tf.function` instead."
            )

    def hold(self, variable: keras.Variable, value: Any) -> Any:
        if self.share is WHOLE or not variable.trainable:
            self.check_write(variable)
        if not variable.trainable:
            return value
        return self.hold_trainable(variable, value)

    @abstractmethod
    def hold_trainable(self, variable: keras.Variable, value: Any) -> Any:
        """Does `hold` for a trainable variable, which tapes watch."""

    def _add(self, values: list[Any]) -> Any:
        check_shapes(values)
        total = tf.add_n(values)
        workers = self.group.workers
        return total if workers is None else workers.sum([total])[0]


class MirroredReplica(TensorFlowReplica):
    """A replica with its own copy of each variable."""

    def __init__(
        self,
        index: int,
        share: Share,
        round_: MeetingRound,
        group: ReplicaGroup = ALONE,
    ) -> None:
        super().__init__(index, share, round_, group)
        self._round = round_

    def hold_trainable(self, variable: keras.Variable, value: Any) -> Any:
        # In place, because a tape watches the variable itself.
        copies = components(internals.native_variable(variable))
        copy = copies[self.index % len(copies)]
        if self.share is WHOLE and tf.executing_eagerly():
            self._round.overwritten.append((copy, copy.read_value()))
        copy.assign(value)
        return None

    def committed(self) -> None:
        self._round.overwritten = []

"""One replica while its thread traces a step, or runs it eagerly."""

import functools
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import keras
import tensorflow as tf

from keras_dist.core.rows import WHOLE
from keras_dist.core.rows import Share
from keras_dist.errors import UnsupportedModelError
from keras_dist.internals.keras_internals import inherit_thread_state
from keras_dist.internals.keras_internals import thread_state
from keras_dist.plugin.replica import ALONE
from keras_dist.plugin.replica import Replica
from keras_dist.plugin.replica import ReplicaGroup
from keras_dist.replica.state import ReplicaState
from keras_dist_tensorflow.keras_internals import native_variable

T = TypeVar("T")


class TensorFlowReplica(Replica):
    """One replica while its thread traces a step, or runs it eagerly.

    `round_` is the run of all replicas, and `derivatives` has, by id, each
    gradient that a tape returned to it.
    """

    def __init__(
        self,
        index: int,
        share: Share,
        round_: Any,
        group: ReplicaGroup = ALONE,
    ) -> None:
        super().__init__(index, share, group)
        self.round = round_
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
        result: T = self.round.meet(self.index, what, fn, value)
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
        native = native_variable(variable)
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


def capture_thread() -> Callable[[], None]:
    """Captures this thread's state in a function that sets it in another."""
    with tf.init_scope():
        state = thread_state()
    return functools.partial(inherit_thread_state, state)

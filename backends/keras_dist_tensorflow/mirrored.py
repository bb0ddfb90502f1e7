"""Mirrored replicas: `tf.distribute.MirroredStrategy` as the engine."""

import contextlib
import weakref
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import keras
import tensorflow as tf

from keras_dist.errors import ReplicaDivergenceError
from keras_dist.plugins import WHOLE
from keras_dist.plugins import Component
from keras_dist.plugins import Plan
from keras_dist.plugins import Replica
from keras_dist.plugins import ReplicaGroup
from keras_dist.plugins import RowShard
from keras_dist.plugins import Storage
from keras_dist.plugins import as_hook
from keras_dist.plugins import current_replica
from keras_dist.plugins import divergence
from keras_dist.plugins import outside_replicas
from keras_dist_tensorflow import keras_internals
from keras_dist_tensorflow import tf_variables
from keras_dist_tensorflow.atomic import AssignmentOrder
from keras_dist_tensorflow.engine import StepExecutor
from keras_dist_tensorflow.executor import TensorFlowStorage
from keras_dist_tensorflow.replica import TensorFlowReplica
from keras_dist_tensorflow.replica import capture_thread
from keras_dist_tensorflow.workers import TensorFlowWorkers

T = TypeVar("T")


# The native strategies that executors have.
_natives: weakref.WeakSet[tf.distribute.Strategy] = weakref.WeakSet()


class CopiesStorage(TensorFlowStorage):
    """The storage of a copy on each device, of a metric's variable one copy."""

    def place(self) -> None:
        native = keras_internals.native_of(self.variable)
        if native is None or not tf.executing_eagerly():
            return
        # A metric's state. Metrics are updated once, on gathered rows.
        # TensorFlow would sum states of replicas when they are read, which is
        # wrong for states that are no sums.
        if self.variable.synchronization == "on_read":
            synchronization = tf.VariableSynchronization.ON_READ
            is_placed = tf_variables.devices_of(native) == (self._device,)
        else:
            synchronization = tf.VariableSynchronization.AUTO
            is_placed = (
                keras_internals.is_distributed(native)
                and native.distribute_strategy is self._executor.native
            )
        if is_placed:
            return
        with self._executor.creation_scope():
            moved = tf_variables.copied(native, synchronization)
        self._executor.moves.move(self.variable, moved)

    def component(self, index: int, value: Callable[[], Any]) -> Component:
        return tf_variables.NativeComponent(
            value, self._executor.plan.devices[index]
        )


class TensorFlowReplicaExecutor(StepExecutor):
    """Keeps a copy on each device, by `tf.distribute.MirroredStrategy`."""

    # TensorFlow reads mirrored variables under their own strategy only.
    shares_layers = False

    def __init__(
        self, plan: Plan, workers: TensorFlowWorkers | None = None
    ) -> None:
        super().__init__(plan, workers)
        # On CPU devices, the collectives of two models can be mistaken for
        # each other's; sums on one device can't.
        self.native = tf.distribute.MirroredStrategy(
            [tf_variables.device_name(device) for device in plan.devices],
            cross_device_ops=tf.distribute.ReductionToOneDevice(),
        )
        _natives.add(self.native)
        self.updater = self.native
        keras_internals.install_applying(self.native)

    def creation_scope(self) -> Any:
        # In the native strategy's own scope, models of other strategies, or of
        # none, can't be read, called or trained.
        return tf.variable_creator_scope(self._create)

    def _create(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        # In a trace: ours make their variables outside of it, so this one is
        # the user's.
        if tf_variables.creation.has_one_copy or not tf.executing_eagerly():
            return next_creator(**kwargs)
        is_at_rendezvous = tf.distribute.get_strategy() is self.native
        if kwargs.get("synchronization") is tf.VariableSynchronization.ON_READ:
            kwargs["synchronization"] = tf.VariableSynchronization.AUTO
            if is_at_rendezvous:
                return tf_variables.apart(
                    lambda: tf.Variable(**kwargs), self.plan.primary
                )
            with (
                tf_variables.one_copy(),
                tf_variables.on_device(self.plan.primary),
            ):
                return next_creator(**kwargs)
        if is_at_rendezvous:
            return next_creator(**kwargs)
        with self.native.scope():
            return tf.Variable(**kwargs)

    def storage(self, variable: keras.Variable) -> Storage:
        return CopiesStorage(variable, self)

    def play(
        self,
        fn: Callable[[Replica], T],
        shares: Sequence[RowShard],
        group: ReplicaGroup,
    ) -> list[T]:
        inherit = capture_thread()
        round_ = MirroredRound(len(shares))
        results: dict[int, T] = {}

        def on_replica() -> None:
            native_context = tf.distribute.get_replica_context()
            index = int(
                tf.get_static_value(native_context.replica_id_in_sync_group)
            )
            inherit()
            replica = MirroredReplica(index, shares[index], round_, group)
            results[index] = fn(replica)

        try:
            is_in_replica = (
                tf.distribute.has_strategy()
                and not tf.distribute.in_cross_replica_context()
            )
            if is_in_replica and tf.executing_eagerly():
                # An update within an update: a native replica cannot call
                # `run`, so the replicas run from a thread without a strategy.
                tf_variables.apart(
                    lambda: self.native.run(on_replica), self.plan.primary
                )
            else:
                self.native.run(on_replica)
        except BaseException as error:
            round_.undo()
            if "different number of" not in str(error) or isinstance(
                error, ReplicaDivergenceError
            ):
                raise
            raise divergence(round_.places()) from error
        finally:
            round_.release()
        return [results[index] for index in range(len(shares))]

    def updating(
        self, optimizer: keras.optimizers.Optimizer
    ) -> contextlib.AbstractContextManager[Any]:
        self.moves.adopt(optimizer, self.native)
        return keras_internals.applying(optimizer)


class MirroredRound:
    """One run of a step's replicas under a native `MirroredStrategy`."""

    def __init__(self, num_replicas: int) -> None:
        self._arrived: list[tuple[str, Any]] = [("", None)] * num_replicas
        self._result: Any = None
        self._order = AssignmentOrder()
        # Pairs of a `tf.Variable` that was written in place and its old value.
        self.overwritten: list[tuple[Any, Any]] = []

    def undo(self) -> None:
        """Restores the variables that replicas wrote and did not commit."""
        for native, value in reversed(self.overwritten):
            native.assign(value)

    def release(self) -> None:
        """Drops the replicas' values. TensorFlow keeps custom gradients of
        graphs, and so what they refer to, as long as the process lives."""
        self._arrived.clear()
        self._result = None

    def places(self) -> list[str | None]:
        return [what or None for what, _ in self._arrived]

    def rendezvous(
        self,
        index: int,
        what: str,
        fn: Callable[[list[Any]], Any],
        value: object,
    ) -> Any:
        """Waits for the other replicas; returns `fn(values)`, called once."""
        self._arrived[index] = (what, value)
        state = current_replica()

        def hold(native: tf.distribute.Strategy) -> None:
            places = self.places()
            if len(set(places)) > 1:
                raise divergence(places)
            values = [value for _, value in self._arrived]
            # `merge_call` runs this in the caller's thread, not in a replica's.
            with outside_replicas(state), self._order.hold():
                self._result = fn(values)

        tf.distribute.get_replica_context().merge_call(hold)
        return self._result


class MirroredReplica(TensorFlowReplica):
    """A replica with its own copy of each variable."""

    def hold_trainable(self, variable: keras.Variable, value: Any) -> Any:
        # In place, because a tape watches the variable itself.
        native = keras_internals.native_of(variable)
        copy = tf_variables.copy_of(native, self.index)
        if self.share is WHOLE and tf.executing_eagerly():
            self.round.overwritten.append((copy, copy.read_value()))
        copy.assign(value)
        return None

    def committed(self) -> None:
        self.round.overwritten = []


@as_hook
def hook_slot(
    original: Callable[..., Any],
    self: Any,
    reference_variable: object,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Stands for the method by which an optimizer makes a slot, under the
    native strategy that has the variable."""

    def slot() -> Any:
        return original(self, reference_variable, *args, **kwargs)

    is_inside = tf.distribute.has_strategy()
    if is_inside and tf.distribute.get_replica_context() is not None:
        return slot()  # a replica of the user's own tf.distribute program
    native = _take_strategy(self, reference_variable)
    if native is not None:
        with native.scope():
            return slot()
    if tf.distribute.get_strategy() in _natives:
        keras_internals.set_strategy(self, tf.distribute.get_strategy())
        return slot()
    made = slot()
    # The slot may have copies, though the variable has one.
    _take_strategy(self, made)
    return made


@as_hook
def hook_build(original: Any, self: Any, variables: Any) -> Any:
    """Stands for `build` of an optimizer, which has to know its strategy.

    Not every optimizer has slots.
    """
    for variable in variables:
        if _take_strategy(self, variable) is not None:
            break
    return original(self, variables)


def _take_strategy(optimizer: keras.Optimizer, variable: keras.Variable) -> Any:
    """Gives an optimizer the native strategy of a variable, if it has one."""
    native = keras_internals.native_of(variable)
    if not keras_internals.is_distributed(native):
        return None
    if native.distribute_strategy not in _natives:
        return None  # it is of the user's own tf.distribute program
    keras_internals.set_strategy(optimizer, native.distribute_strategy)
    return native.distribute_strategy

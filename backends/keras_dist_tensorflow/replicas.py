"""Mirrored replicas: `tf.distribute.MirroredStrategy` as the engine."""

import contextlib
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import keras
import tensorflow as tf

from keras_dist.core.plan import Plan
from keras_dist.core.rows import Share
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.internals.keras_internals import inherit_thread_state
from keras_dist.internals.keras_internals import thread_state
from keras_dist.plugin.replica import Replica
from keras_dist.plugin.replica import ReplicaGroup
from keras_dist.plugin.replica import divergence
from keras_dist.plugin.replica import named
from keras_dist_tensorflow import keras_internals
from keras_dist_tensorflow import runtime_internals
from keras_dist_tensorflow.keras_internals import adopt_optimizer
from keras_dist_tensorflow.keras_internals import native_variable
from keras_dist_tensorflow.meetings import MeetingRound
from keras_dist_tensorflow.meetings import MirroredReplica
from keras_dist_tensorflow.runtime_internals import install_conversions
from keras_dist_tensorflow.steps import StepExecutor
from keras_dist_tensorflow.variables import apart
from keras_dist_tensorflow.variables import copied
from keras_dist_tensorflow.variables import creates_mirrored
from keras_dist_tensorflow.variables import devices_of
from keras_dist_tensorflow.variables import install_slots
from keras_dist_tensorflow.variables import is_metric_state
from keras_dist_tensorflow.variables import native_name
from keras_dist_tensorflow.workers import TensorFlowWorkers

T = TypeVar("T")


class TensorFlowReplicaExecutor(StepExecutor):
    """Keeps a copy of each variable on each device.

    `tf.distribute.MirroredStrategy` keeps the copies and runs the replicas.
    """

    # TensorFlow reads mirrored variables under their own strategy only.
    shares_layers = False

    def __init__(
        self, plan: Plan, workers: TensorFlowWorkers | None = None
    ) -> None:
        super().__init__(plan, workers)
        # On CPU devices, the collectives of two models can be mistaken for
        # each other's; sums on one device can't.
        self._native = tf.distribute.MirroredStrategy(
            [native_name(device) for device in plan.devices],
            cross_device_ops=tf.distribute.ReductionToOneDevice(),
        )
        self.updater = self._native
        runtime_internals.silence_advice()
        install_slots()
        install_conversions()
        keras_internals.install_applying(self._native)

    def creation_scope(self) -> contextlib.AbstractContextManager[Any]:
        return creates_mirrored(self._native, self.plan.primary)

    def place(self, variable: keras.Variable) -> None:
        native = native_variable(variable)
        if native is None or self._holds(variable, native):
            return
        if not tf.executing_eagerly():
            return
        with self.creation_scope():
            moved = copied(
                native,
                tf.VariableSynchronization.ON_READ
                if is_metric_state(variable)
                else tf.VariableSynchronization.AUTO,
            )
        self._moves.move(variable, moved)

    def _holds(self, variable: keras.Variable, native: Any) -> bool:
        if is_metric_state(variable):
            return devices_of(native) == (self.plan.primary,)
        return (
            isinstance(native, tf.distribute.DistributedValues)
            and native.distribute_strategy is self._native
        )

    def play(
        self,
        fn: Callable[[int, Replica], T],
        shares: Sequence[Share],
        group: ReplicaGroup,
    ) -> dict[int, T]:
        with tf.init_scope():
            state = thread_state()
        round_ = MeetingRound(len(shares))
        results: dict[int, T] = {}

        def on_replica() -> None:
            native_context = tf.distribute.get_replica_context()
            index = int(
                tf.get_static_value(native_context.replica_id_in_sync_group)
            )
            inherit_thread_state(state)
            replica = MirroredReplica(index, shares[index], round_, group)
            with named(replica.id, self.plan.num_replicas):
                results[index] = fn(index, replica)

        def run() -> None:
            self._native.run(
                tf.autograph.experimental.do_not_convert(on_replica)
            )

        try:
            if _in_native_replica() and tf.executing_eagerly():
                # An update within an update: a native replica cannot call
                # `run`, so the replicas run from a thread without a strategy.
                apart(run, self.plan.primary)
            else:
                run()
        except BaseException as error:
            round_.undo()
            if "different number of" not in str(error) or isinstance(
                error, ReplicaDivergenceError
            ):
                raise
            raise divergence(round_.places()) from error
        return results

    def updating(
        self, optimizer: keras.optimizers.Optimizer
    ) -> contextlib.AbstractContextManager[Any]:
        adopt_optimizer(optimizer, self._native, {})
        return keras_internals.applying(optimizer)


def _in_native_replica() -> bool:
    return (
        tf.distribute.has_strategy()
        and not tf.distribute.in_cross_replica_context()
    )

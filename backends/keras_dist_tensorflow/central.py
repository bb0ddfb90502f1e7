"""Central storage: replicas that read one copy of each variable."""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import keras
import tensorflow as tf

from keras_dist.core.components import Component
from keras_dist.core.device import Device
from keras_dist.core.plan import Plan
from keras_dist.core.plan import num_bytes
from keras_dist.core.rows import Share
from keras_dist.plugin.replica import Replica
from keras_dist.plugin.replica import ReplicaGroup
from keras_dist.plugin.replica import named
from keras_dist.plugin.threads import BatonPool
from keras_dist_tensorflow import keras_internals
from keras_dist_tensorflow.gradients import finished
from keras_dist_tensorflow.held import HeldVariable
from keras_dist_tensorflow.hosted import HostedRound
from keras_dist_tensorflow.hosted import capture_thread
from keras_dist_tensorflow.hosted import played
from keras_dist_tensorflow.keras_internals import adopt_optimizer
from keras_dist_tensorflow.keras_internals import native_variable
from keras_dist_tensorflow.keras_internals import replace_native_variable
from keras_dist_tensorflow.meetings import TensorFlowReplica
from keras_dist_tensorflow.steps import StepExecutor
from keras_dist_tensorflow.variables import NativeComponent
from keras_dist_tensorflow.variables import copied
from keras_dist_tensorflow.variables import devices_of
from keras_dist_tensorflow.variables import native_name
from keras_dist_tensorflow.workers import TensorFlowWorkers

T = TypeVar("T")


class _Current(threading.local):
    is_moving = False


_current = _Current()


@contextlib.contextmanager
def _moving() -> Iterator[None]:
    """Leaves new variables on this thread's device, not on the primary."""
    _current.is_moving = True
    try:
        yield
    finally:
        _current.is_moving = False


class CentralExecutor(StepExecutor):
    """Keeps one copy of each variable, a plain `tf.Variable`.

    Replicas are unrolled in one graph, each on its device, and read the
    copies from there. Sums and updates run where the copies are.
    """

    def __init__(
        self, plan: Plan, workers: TensorFlowWorkers | None = None
    ) -> None:
        super().__init__(plan, workers)
        keras_internals.install_early_kernels()
        self.updater = AtOwners()
        self._threads = BatonPool(capture_thread)
        # Variables made since the last step, by `id`: no trace has them.
        self._new: weakref.WeakValueDictionary[int, Any] = (
            weakref.WeakValueDictionary()
        )

    def creation_scope(self) -> contextlib.AbstractContextManager[Any]:
        def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
            if _current.is_moving:
                return next_creator(**kwargs)
            with tf.device(native_name(self.plan.primary)):
                native = next_creator(**kwargs)
            self._new[id(native)] = native
            return native

        scope: contextlib.AbstractContextManager[Any] = (
            tf.variable_creator_scope(create)
        )
        return scope

    def place(self, variable: keras.Variable) -> None:
        native = native_variable(variable)
        if native is None or not tf.executing_eagerly():
            return
        owner = self.owners.of(variable)
        is_new = self._new.pop(id(native), None) is native
        if devices_of(native) == (owner,):
            return
        with _moving(), tf.device(native_name(owner)):
            moved = copied(native)
        if is_new:
            replace_native_variable(variable, moved)
        else:
            self._moves.move(variable, moved)

    def devices_of(self, variable: keras.Variable) -> tuple[Device, ...]:
        native = native_variable(variable)
        if native is None:
            return (self.owners.of(variable),)
        return devices_of(native)

    def bytes_on(self, variable: keras.Variable) -> dict[Device, int]:
        whole = num_bytes(variable)
        kept = dict.fromkeys(self.devices_of(variable), whole)
        strategy = vars(variable).get("distribute_strategy")
        if strategy is not None and id(variable) in strategy.has_components:
            owner = self.owners.of(variable)
            parts = whole * len(self.plan.replicas)
            # The variable itself may not have moved to its owner yet.
            kept[owner] = kept.get(owner, 0) + parts
        return kept

    def component(
        self, variable: keras.Variable, index: int, value: Callable[[], Any]
    ) -> Component:
        return NativeComponent(value, self.owners.of(variable))

    def play(
        self,
        fn: Callable[[int, Replica], T],
        shares: Sequence[Share],
        group: ReplicaGroup,
    ) -> dict[int, T]:
        round_ = HostedRound(len(shares), self.plan.primary)
        self._new.clear()

        def on_replica(index: int) -> T:
            replica = CentralReplica(index, shares[index], round_, group)
            with named(replica.id, self.plan.num_replicas):
                return fn(index, replica)

        fns = [
            functools.partial(on_replica, index) for index in range(len(shares))
        ]
        # A trace happens once: its pool of threads ends with it.
        kept = tf.executing_eagerly()
        pool = self._threads if kept else BatonPool(capture_thread)
        results = played(pool, round_, fns, self.plan.devices)
        return dict(enumerate(results))

    def sum_gradients(
        self,
        replica: Replica,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        variables: Sequence[keras.Variable],
    ) -> list[Any]:
        if len(self.plan.variable_devices) == 1:
            return super().sum_gradients(replica, gradients, weights, variables)
        sums = []
        columns = zip(*gradients, strict=True)
        for variable, column in zip(variables, columns, strict=True):
            with tf.device(native_name(self.owners.of(variable))):
                sums += self.locally_summed(
                    [[own] for own in column], weights, [variable.path]
                )
        return finished(sums, self.workers)

    @contextlib.contextmanager
    def updating(self, optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
        adopt_optimizer(optimizer, self.updater, {})
        with tf.device(native_name(self.plan.primary)):
            yield


class CentralReplica(TensorFlowReplica):
    """A replica without copies of variables of its own."""

    def hold_trainable(self, variable: keras.Variable, value: Any) -> Any:
        self.check_write(variable)
        return HeldVariable(value, variable.name)


class AtOwners:
    """Stand-in for a native strategy in Keras' optimizers.

    Each variable is updated on the device that keeps it.
    """

    @property
    def extended(self) -> "AtOwners":
        """This object, which has the methods that Keras calls itself."""
        return self

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls `fn(var, ...)` on the variable's device."""
        with tf.device(var.device):
            return fn(var, *args, **(kwargs or {}))

    def colocate_vars_with(
        self, colocate_with_variable: Any
    ) -> contextlib.AbstractContextManager[Any]:
        """Places new variables on the device of another one."""
        scope: contextlib.AbstractContextManager[Any] = tf.device(
            colocate_with_variable.device
        )
        return scope

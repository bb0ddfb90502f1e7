"""Central storage: replicas that read one copy of each variable."""

import contextlib
import functools
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import keras
import tensorflow as tf

from keras_dist.plugins import CentralVariable
from keras_dist.plugins import Component
from keras_dist.plugins import Device
from keras_dist.plugins import LockstepThreads
from keras_dist.plugins import Owners
from keras_dist.plugins import Plan
from keras_dist.plugins import Replica
from keras_dist.plugins import ReplicaGroup
from keras_dist.plugins import Round
from keras_dist.plugins import RowShard
from keras_dist.plugins import Storage
from keras_dist.plugins import as_hook
from keras_dist.plugins import current_replica
from keras_dist.plugins import divergence
from keras_dist.plugins import outside_replicas
from keras_dist_tensorflow import keras_internals
from keras_dist_tensorflow import runtime_internals
from keras_dist_tensorflow import tf_variables
from keras_dist_tensorflow.atomic import AssignmentOrder
from keras_dist_tensorflow.engine import StepExecutor
from keras_dist_tensorflow.executor import TensorFlowStorage
from keras_dist_tensorflow.replica import TensorFlowReplica
from keras_dist_tensorflow.replica import capture_thread
from keras_dist_tensorflow.workers import TensorFlowWorkers

T = TypeVar("T")


class OneCopyStorage(TensorFlowStorage):
    """The storage of a variable with a single copy."""

    kind = "central"

    @property
    def devices(self) -> tuple[Device, ...]:
        return (self._device,)

    def place(self) -> None:
        native = keras_internals.native_of(self.variable)
        if native is None or not tf.executing_eagerly():
            return
        is_new = self._executor.new.pop(id(native), None) is native
        if tf_variables.devices_of(native) == (self._device,):
            return
        with tf_variables.one_copy(), tf_variables.on_device(self._device):
            moved = tf_variables.copied(native)
        if is_new:
            keras_internals.replace_native_variable(self.variable, moved)
        else:
            self._executor.moves.move(self.variable, moved)

    def component_devices(self) -> tuple[Device, ...]:
        # The variable itself may not have moved there yet.
        return (self._device,) * len(super().component_devices())

    def component(self, index: int, value: Callable[[], Any]) -> Component:
        return tf_variables.NativeComponent(value, self._device)


class CentralExecutor(StepExecutor):
    """Keeps one `tf.Variable` each; replicas are unrolled in one graph."""

    def __init__(
        self, plan: Plan, workers: TensorFlowWorkers | None = None
    ) -> None:
        super().__init__(plan, workers)
        self.updater = AtOwners()
        self._owners = Owners(plan.variable_devices)
        self._threads = LockstepThreads(capture_thread)
        # Variables made since the last step, by `id`: no trace has them.
        self.new: weakref.WeakValueDictionary[int, Any] = (
            weakref.WeakValueDictionary()
        )

    def creation_scope(self) -> Any:
        def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
            if tf_variables.creation.has_one_copy:
                return next_creator(**kwargs)
            with tf_variables.on_device(self.plan.primary):
                native = next_creator(**kwargs)
            self.new[id(native)] = native
            return native

        return tf.variable_creator_scope(create)

    def storage(self, variable: keras.Variable) -> Storage:
        return OneCopyStorage(variable, self)

    def parameter_device(self, variable: keras.Variable) -> Device:
        return self._owners.of(variable)

    def keep_together(
        self, variable: keras.Variable, reference: keras.Variable
    ) -> None:
        self._owners.keep_together(variable, reference)

    def play(
        self,
        fn: Callable[[Replica], T],
        shares: Sequence[RowShard],
        group: ReplicaGroup,
    ) -> list[T]:
        self.new.clear()
        round_ = HostedRound(len(shares), self.plan.primary)
        in_graph = _captured_graph()
        taken_over = runtime_internals.captured_creation()

        def on_replica(index: int) -> T:
            # Only replica 0 writes summaries, else each is written many times.
            with (
                in_graph(index),
                taken_over(writes=index == 0),
                tf_variables.on_device(self.plan.devices[index]),
            ):
                return fn(CentralReplica(index, shares[index], round_, group))

        fns = [functools.partial(on_replica, i) for i in range(len(shares))]
        # A trace happens once: its pool of threads ends with it.
        kept = tf.executing_eagerly()
        pool = self._threads if kept else LockstepThreads(capture_thread)
        return pool.run(round_, [round_.host, *fns])[1:]

    @contextlib.contextmanager
    def updating(self, optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
        self.moves.adopt(optimizer, self.updater)
        with tf_variables.on_device(self.plan.primary):
            yield


@as_hook
def hook_convolution(
    original: Callable[..., Any],
    inputs: object,
    kernel: object,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Stands for Keras' convolution, whose kernel is read first: XLA can't
    read it on another device."""
    if isinstance(kernel, CentralVariable):
        kernel = tf.convert_to_tensor(kernel)
    return original(inputs, kernel, *args, **kwargs)


class CentralReplica(TensorFlowReplica):
    """A replica without copies of variables of its own."""

    def hold_trainable(self, variable: keras.Variable, value: object) -> Any:
        self.check_write(variable)
        return HeldVariable(value, variable.name)


class AtOwners:
    """Stand-in for a native strategy: updates variables where they are."""

    @property
    def extended(self) -> "AtOwners":
        return self

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        with tf.device(var.device):
            return fn(var, *args, **(kwargs or {}))

    def colocate_vars_with(self, colocate_with_variable: Any) -> Any:
        return tf.device(colocate_with_variable.device)


class HeldVariable(runtime_internals.BaseResourceVariable):
    """A tensor a replica has assigned, which tapes watch like a variable."""

    def __init__(self, value: Any, name: str) -> None:
        # The only copy must not change before all replicas agree. Gradients
        # stop at this value, as they do at a variable.
        value = tf.stop_gradient(value)
        super().__init__(
            trainable=True,
            shape=value.shape,
            dtype=value.dtype,
            handle=value,
            handle_name=name,
            unique_id=name,
            synchronization=tf.VariableSynchronization.AUTO,
            aggregation=tf.VariableAggregation.NONE,
        )

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        runtime_internals.watch(self)
        return self.handle

    def sparse_read(self, indices: object, name: str | None = None) -> Any:
        return tf.gather(self._read_variable_op(), indices, name=name)

    def gather_nd(self, indices: object, name: str | None = None) -> Any:
        return tf.gather_nd(self._read_variable_op(), indices, name=name)


class HostedRound(Round):
    """A run of replicas that meet in the caller's thread, which has turn 0."""

    def __init__(self, num_replicas: int, place: Device) -> None:
        # Tapes open in the caller's thread do not record replicas, and tapes of
        # replicas do not record rendezvous.
        super().__init__(num_replicas + 1)
        self._place = place
        self._order = AssignmentOrder()

    def play(self, index: int, fn: Callable[[], Any]) -> None:
        def noted() -> Any:
            try:
                return fn()
            except BaseException as error:
                # Set first, so that the base class adds no note: its index
                # counts the caller, and `named` has noted the replica's.
                self.error = self.error or error
                raise

        super().play(index, noted)

    def rendezvous(
        self,
        index: int,
        what: str,
        hold: Callable[[list[Any]], Any],
        value: object,
    ) -> Any:
        state = current_replica()

        def hold_here(values: list[Any]) -> Any:
            with (
                outside_replicas(state),
                tf_variables.on_device(self._place),
                self._order.hold(),
            ):
                return hold(values)

        return super().rendezvous(index + 1, what, hold_here, value)

    def host(self) -> None:
        """Runs the replicas' rendezvous until every replica has ended."""
        while True:
            super().rendezvous(0, "", list, None)
            arrived, self._waiting = self._waiting, {}
            del arrived[0]
            if not arrived:
                return
            count = len(self.results) - 1
            places = [arrived.get(i + 1, (None,))[0] for i in range(count)]
            if len(set(places)) > 1:
                raise divergence(places)
            values = [arrived[index][1] for index in sorted(arrived)]
            self._result = self._hold(values)

    def _hold_rendezvous(self) -> None:
        """Does nothing: the host has the next turn and runs the rendezvous."""


def _captured_graph() -> Callable[[int], Any]:
    """Captures this thread's graph in a context for replicas' threads."""
    if tf.executing_eagerly():
        return lambda index: contextlib.nullcontext()
    graph = tf.compat.v1.get_default_graph()
    # Otherwise threads share the graph's stacks, such as that of devices.
    graph.switch_to_thread_local()
    scope = graph.get_name_scope()
    prefix = f"{scope}/" if scope else ""

    @contextlib.contextmanager
    def in_graph(index: int) -> Iterator[None]:
        # A name that ends with a slash is entered again as it is.
        name = f"{prefix}replica_{index}/" if index else prefix
        names = tf.name_scope(name) if name else contextlib.nullcontext()
        with graph.as_default(), names:
            yield

    return in_graph

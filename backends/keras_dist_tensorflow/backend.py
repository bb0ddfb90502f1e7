"""The TensorFlow plugin: its devices, executors and workers."""

import contextlib
import sys
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.errors import VirtualDevicesError
from keras_dist.plugins import Backend
from keras_dist.plugins import Cluster
from keras_dist.plugins import CommunicationOptions
from keras_dist.plugins import Device
from keras_dist.plugins import Differentiated
from keras_dist.plugins import Differentiates
from keras_dist.plugins import Executor
from keras_dist.plugins import Following
from keras_dist.plugins import Hook
from keras_dist.plugins import Plan
from keras_dist.plugins import current_call
from keras_dist.plugins import leave_at_exit
from keras_dist.plugins import parse_device
from keras_dist_tensorflow import runtime_internals
from keras_dist_tensorflow.central import CentralExecutor
from keras_dist_tensorflow.cluster import local_devices
from keras_dist_tensorflow.compiler import TensorFlowCompiler
from keras_dist_tensorflow.executor import TensorFlowOneDeviceExecutor
from keras_dist_tensorflow.hooks import table
from keras_dist_tensorflow.mirrored import TensorFlowReplicaExecutor
from keras_dist_tensorflow.profiler import TensorFlowProfiler
from keras_dist_tensorflow.workers import TensorFlowWorkers

_TAKEN_OVER = (
    tf.distribute.MirroredStrategy,
    tf.distribute.OneDeviceStrategy,
    tf.compat.v1.distribute.MirroredStrategy,
    tf.compat.v1.distribute.OneDeviceStrategy,
)

_OF_TPUS = (
    tf.distribute.TPUStrategy,
    tf.distribute.experimental.TPUStrategy,
    tf.compat.v1.distribute.experimental.TPUStrategy,
)


class TensorFlowBackend(Backend, Differentiates):
    """The `Backend` over TensorFlow's logical devices."""

    def __init__(self) -> None:
        self._profiler = TensorFlowProfiler()
        self._compiler = TensorFlowCompiler()
        self._workers: TensorFlowWorkers | None = None

    def hooks(self) -> Iterable[Hook]:
        return table()

    def list_devices(self) -> Sequence[Device]:
        return [
            Device(kind, index)
            for kind in ("gpu", "tpu", "cpu")
            for index in range(len(local_devices(kind.upper())))
        ]

    def set_virtual_devices(self, num_devices: int, device_type: str) -> None:
        physical = tf.config.list_physical_devices(device_type.upper())[0]
        configuration = tf.config.LogicalDeviceConfiguration()
        try:
            tf.config.set_logical_device_configuration(
                physical, [configuration] * num_devices
            )
        except RuntimeError as error:
            present = len(local_devices(device_type.upper()))
            if present == num_devices:
                return
            raise VirtualDevicesError(
                f"set_virtual_devices({num_devices}) was called after "
                f"TensorFlow had started, with {present} CPU device(s). Call "
                "it before anything makes a tensor, a variable or a "
                "strategy, or set the environment variable "
                "KERAS_DIST_VIRTUAL_DEVICES before keras_dist is imported."
            ) from error

    def join(self, cluster: Cluster, options: CommunicationOptions) -> None:
        if cluster.num_workers == 1:
            return
        if self._workers is None:
            self._workers = TensorFlowWorkers(cluster, options)
            self._compiler.workers = self._workers
            leave_at_exit(self._workers)
        else:
            self._workers.check_same(cluster, options)

    def executor(self, plan: Plan) -> Executor:
        if plan.is_one_device:
            return TensorFlowOneDeviceExecutor(plan)
        return TensorFlowReplicaExecutor(plan, self._workers_of(plan))

    def central_executor(self, plan: Plan) -> Executor:
        return CentralExecutor(plan, self._workers_of(plan))

    def _workers_of(self, plan: Plan) -> TensorFlowWorkers | None:
        return self._workers if plan.num_workers > 1 else None

    def random_state(self) -> str:
        return runtime_internals.random_state()

    def set_random_state(self, state: str) -> None:
        runtime_internals.set_random_state(state)

    def profiler(self) -> TensorFlowProfiler:
        return self._profiler

    def compiler(self) -> TensorFlowCompiler:
        return self._compiler

    def print(
        self, values: Sequence[Any], sep: str, end: str, replica: Any
    ) -> None:
        if tf.executing_eagerly():
            super().print(values, sep, end, replica)
            return
        prefix = "" if replica is None else f"replica {int(replica)}: "
        pieces = [prefix]
        for value in values:
            pieces += [value, sep]
        # One string, so that the lines of replicas that print at the same
        # time do not mix.
        tf.print(
            *(pieces[:-1] if values else pieces),
            sep="",
            end=end,
            output_stream=sys.stdout,
        )

    def plan_of_native(self, strategy: object) -> Plan:
        if isinstance(strategy, _OF_TPUS):
            raise TypeError(
                "A strategy of TPUs can't be taken over: TensorFlow traces "
                "one program for all cores, and keras_dist traces one for "
                f"each replica. Received: {strategy!r} of type "
                f"{type(strategy).__name__}. Use `keras_dist.TPUStrategy`, "
                "with KERAS_BACKEND=jax."
            )
        if not isinstance(strategy, _TAKEN_OVER):
            raise TypeError(
                "Only a tf.distribute strategy with one worker and a copy of "
                "each variable on each device can be taken over. Received: "
                f"{strategy!r} of type {type(strategy).__name__}. Expected: a "
                "tf.distribute.MirroredStrategy or OneDeviceStrategy."
            )
        extended = strategy.extended
        return Plan(
            replicas=tuple(
                (parse_device(name),) for name in extended.worker_devices
            ),
            variable_devices=tuple(
                map(parse_device, extended.parameter_devices)
            ),
        )

    def differentiate(
        self,
        fn: Callable[..., tuple[Any, Any]],
        variables: Sequence[keras.Variable],
        tensors: Sequence[Any],
    ) -> Differentiated:
        # In a replica this is its own copy, or the tensor that it has assigned.
        read = [variable.value for variable in variables]
        # New tensors: `fn` may use the caller's through a closure, and those
        # uses are not differentiated.
        copies = [tf.identity(tensor) for tensor in tensors]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*read, *copies])
            with _following(variables, read, tape) as assigned:
                value, aux = fn(*copies)
        # After the tape's scope, so that only tapes around it record this.
        more = [tensor for _, tensor in assigned]
        gradients = tape.gradient(value, [*read, *copies, *more])
        for place, _ in reversed(assigned):
            gradient = gradients.pop()
            if gradient is not None and gradients[place] is not None:
                gradient = tf.add(gradients[place], gradient)
            if gradient is not None:
                gradients[place] = gradient
        of_tensors = [
            None if gradient is None else tf.convert_to_tensor(gradient)
            for gradient in gradients[len(read) :]
        ]
        return value, aux, gradients[: len(read)] + of_tensors


@contextlib.contextmanager
def _following(
    variables: Sequence[keras.Variable], read: Sequence[Any], tape: Any
) -> Iterator[list[tuple[int, Any]]]:
    """Has a tape watch what a replica assigns to what it reads as tensors.

    Yields the places of these variables, and the tensors.
    """
    watched: list[tuple[int, Any]] = []
    tensors = [
        (variable, value)
        for variable, value in zip(variables, read, strict=True)
        if current_call() is not None and not variable.trainable
    ]
    if not tensors:
        yield watched
        return
    places = {id(variable): place for place, variable in enumerate(variables)}

    def follow(variable: keras.Variable, value: Any) -> Any:
        tensor = tf.identity(value)
        tape.watch(tensor)
        watched.append((places[id(variable)], tensor))
        return tensor

    with Following(tensors, follow) as overlay:
        yield watched
    overlay.release()

"""The ground of all executors, and the one for one device: plain Keras."""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from keras_dist.plugins import STEPS
from keras_dist.plugins import Device
from keras_dist.plugins import Executor
from keras_dist.plugins import Plan
from keras_dist.plugins import Storage
from keras_dist.plugins import parse_device
from keras_dist_tensorflow import keras_internals
from keras_dist_tensorflow import tf_variables
from keras_dist_tensorflow.cluster import local_devices
from keras_dist_tensorflow.compiler import TensorFlowCompiler
from keras_dist_tensorflow.trainer import built_first
from keras_dist_tensorflow.workers import TensorFlowWorkers


class TensorFlowStorage(Storage):
    """The storage of a variable that is one or several `tf.Variable`s."""

    def __init__(self, variable: keras.Variable, executor: Any) -> None:
        super().__init__(variable)
        self._executor = executor  # a `TensorFlowExecutor`
        self._device: Device = executor.parameter_device(variable)

    @property
    def devices(self) -> tuple[Device, ...]:
        native = keras_internals.native_of(self.variable)
        return (
            (self._device,)
            if native is None
            else tf_variables.devices_of(native)
        )

    def read(self, index: int) -> Any:
        native = keras_internals.native_of(self.variable)
        return tf_variables.copy_of(native, index).read_value()


class TensorFlowExecutor(Executor):
    """An executor whose variables are `tf.Variable`s."""

    assigns_in_place = True
    workers: TensorFlowWorkers | None

    def __init__(
        self, plan: Plan, workers: TensorFlowWorkers | None = None
    ) -> None:
        super().__init__(plan, workers)
        self.moves = tf_variables.Replacements()

    def parameter_device(self, variable: keras.Variable) -> Device:
        """Returns the device of a variable's first copy."""
        return self.plan.primary

    def default_device(self) -> str:
        with tf.init_scope():
            device: str = tf.constant(0.0).device
        return device

    def put(self, value: object, device: Device) -> Any:
        with tf_variables.on_device(device):
            return tf.identity(ops.convert_to_tensor(value))

    def is_live(self, value: object) -> bool:
        return isinstance(value, tf.Variable)

    def snapshot(self, value: object, index: int = 0) -> Any:
        if not self.is_live(value):
            return value
        copy = tf_variables.copy_of(value, index)
        # Without this, the value is read to the current device.
        with tf.device(copy.device):
            return copy.read_value()

    def device_of(self, tensor: object) -> Device:
        if not isinstance(tensor, tf.Tensor) or not tensor.device:
            return self.plan.primary
        return parse_device(tensor.device)

    def concatenate(self, values: Sequence[Any], axis: int) -> Any:
        with tf_variables.on_device(self.plan.primary):
            local = tf.concat(values, axis)
        if self.workers is None:
            return local
        return self.workers.concatenate(local, axis)

    def recover(self, model: keras.Model) -> None:
        # A trace that failed would make the next `fit` fail with another error.
        keras_internals.forget_functions(model)


class OneDeviceStorage(TensorFlowStorage):
    """The storage of a variable on the only device."""

    def place(self) -> None:
        native = keras_internals.native_of(self.variable)
        if native is None or tf_variables.devices_of(native) == (self._device,):
            return
        # The caller may have opened another device.
        with tf_variables.on_device(self._device):
            moved = tf_variables.copied(native)
        self._executor.moves.move(self.variable, moved)


class TensorFlowOneDeviceExecutor(TensorFlowExecutor):
    """Runs Keras' own steps on one device, without splitting batches."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.compiler = TensorFlowCompiler()
        default = Device("gpu" if local_devices("GPU") else "cpu", 0)
        self._scope: Callable[[], Any] = (
            contextlib.nullcontext
            if plan.primary == default
            else functools.partial(tf_variables.on_device, plan.primary)
        )
        self.compiler.scope = self._scope

    def creation_scope(self) -> Any:
        return self._scope()

    def execution_scope(self) -> Any:
        return self.creation_scope()

    def storage(self, variable: keras.Variable) -> Storage:
        return OneDeviceStorage(variable, self)

    def bind(self, model: keras.Model) -> Mapping[str, Callable[..., Any]]:
        # A user's own step may use the model's variables before it calls the
        # model. On several replicas the model is built by then; here too.
        owner = type(model)
        return {
            name: built_first(
                model, name, functools.partial(getattr(owner, name), model)
            )
            for name in STEPS
            if getattr(owner, name) is not getattr(keras.Model, name)
        }

    def prepare(self, model: keras.Model) -> None:
        self.moves.follow(model, tf.distribute.get_strategy())

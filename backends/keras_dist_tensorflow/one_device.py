"""The executor for one device: plain Keras."""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.core.device import Device
from keras_dist.core.plan import Plan
from keras_dist.plugin.executor import Executor
from keras_dist.plugin.front_end import STEPS
from keras_dist_tensorflow import internals
from keras_dist_tensorflow.cluster import local_devices
from keras_dist_tensorflow.compiler import TensorFlowCompiler
from keras_dist_tensorflow.trainer import built_first
from keras_dist_tensorflow.variables import Moves
from keras_dist_tensorflow.variables import copied
from keras_dist_tensorflow.variables import default_device
from keras_dist_tensorflow.variables import device_of
from keras_dist_tensorflow.variables import devices_of
from keras_dist_tensorflow.variables import is_native
from keras_dist_tensorflow.variables import native_name
from keras_dist_tensorflow.variables import put
from keras_dist_tensorflow.variables import snapshot


class TensorFlowOneDeviceExecutor(Executor):
    """Runs Keras' own steps on one device, without splitting batches."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.compiler = TensorFlowCompiler(plan.num_replicas)
        default = Device("gpu" if local_devices("GPU") else "cpu", 0)
        self._scope: Callable[[], contextlib.AbstractContextManager[Any]] = (
            contextlib.nullcontext
            if plan.primary == default
            else functools.partial(tf.device, native_name(plan.primary))
        )
        self.compiler.scope = self._scope
        self._moves = Moves()

    def creation_scope(self) -> contextlib.AbstractContextManager[Any]:
        return self._scope()

    def execution_scope(self) -> contextlib.AbstractContextManager[Any]:
        return self.creation_scope()

    def default_device(self) -> str:
        return default_device()

    def place(self, variable: keras.Variable) -> None:
        native = internals.native_variable(variable)
        if native is None or devices_of(native) == (self.plan.primary,):
            return
        # `_scope` is a null context where this device is TensorFlow's
        # default, and the caller may have opened another device.
        with tf.device(native_name(self.plan.primary)):
            moved = copied(native)
        self._moves.move(variable, moved)

    def devices_of(self, variable: keras.Variable) -> tuple[Device, ...]:
        native = internals.native_variable(variable)
        return (self.plan.primary,) if native is None else devices_of(native)

    def put(self, value: Any, device: Device) -> Any:
        return put(value, device)

    def snapshot(self, value: Any, index: int = 0) -> Any:
        return snapshot(value, index)

    def is_live(self, value: Any) -> bool:
        return is_native(value)

    def device_of(self, tensor: Any) -> Device:
        return device_of(tensor) or self.plan.primary

    def copy_of(self, variable: keras.Variable, index: int) -> Any:
        return internals.native_variable(variable).read_value()

    def concatenate(self, values: Sequence[Any], axis: int) -> Any:
        return tf.concat(values, axis)

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
        self._moves.follow(model, tf.distribute.get_strategy())

    def recover(self, model: keras.Model) -> None:
        internals.forget_functions(model)

"""The executor for one device: plain Keras."""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from keras_dist.core.device import Device
from keras_dist.core.plan import Plan
from keras_dist.plugin.front_end import STEPS
from keras_dist.plugin.home import Home
from keras_dist_tensorflow.cluster import local_devices
from keras_dist_tensorflow.compiler import TensorFlowCompiler
from keras_dist_tensorflow.executor import TensorFlowExecutor
from keras_dist_tensorflow.executor import TensorFlowHome
from keras_dist_tensorflow.keras_internals import native_variable
from keras_dist_tensorflow.trainer import built_first
from keras_dist_tensorflow.variables import copied
from keras_dist_tensorflow.variables import devices_of
from keras_dist_tensorflow.variables import native_name


class OneDeviceHome(TensorFlowHome):
    """The home of a variable on the only device."""

    def settle(self) -> None:
        native = native_variable(self.variable)
        if native is None or devices_of(native) == (self._keeper,):
            return
        # The caller may have opened another device.
        with tf.device(native_name(self._keeper)):
            moved = copied(native)
        self._moves.move(self.variable, moved)


class TensorFlowOneDeviceExecutor(TensorFlowExecutor):
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

    def creation_scope(self) -> contextlib.AbstractContextManager[Any]:
        return self._scope()

    def execution_scope(self) -> contextlib.AbstractContextManager[Any]:
        return self.creation_scope()

    def home(self, variable: keras.Variable) -> Home:
        return OneDeviceHome(variable, self.plan.primary, self._moves)

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

"""Devices and executors on TensorFlow."""

from collections.abc import Sequence

import tensorflow as tf

from keras_dist.backend import Backend
from keras_dist.backend import Executor
from keras_dist.device import Device
from keras_dist.errors import VirtualDevicesError
from keras_dist.plan import Plan
from keras_dist_tensorflow.one_device import OneDeviceExecutor
from keras_dist_tensorflow.replicas import ReplicaExecutor


class TensorFlowBackend(Backend):
    """TensorFlow's logical devices."""

    def list_devices(self) -> Sequence[Device]:
        return [
            Device(kind, index)
            for kind in ("gpu", "tpu", "cpu")
            for index in range(
                len(tf.config.list_logical_devices(kind.upper()))
            )
        ]

    def set_virtual_devices(self, num_devices: int, device_type: str) -> None:
        physical = tf.config.list_physical_devices(device_type.upper())[0]
        each = tf.config.LogicalDeviceConfiguration()
        try:
            tf.config.set_logical_device_configuration(
                physical, [each] * num_devices
            )
        except RuntimeError as error:
            present = len(tf.config.list_logical_devices(device_type.upper()))
            if present == num_devices:
                return
            raise VirtualDevicesError(
                f"set_virtual_devices({num_devices}) came after TensorFlow "
                f"had started, with {present} CPU device(s). Call it before "
                "anything makes a tensor, a variable or a strategy, or set "
                "the environment variable KERAS_DIST_VIRTUAL_DEVICES before "
                "keras_dist is imported."
            ) from error

    def executor(self, plan: Plan) -> Executor:
        if plan.num_replicas == 1:
            return OneDeviceExecutor(plan)
        return ReplicaExecutor(plan)

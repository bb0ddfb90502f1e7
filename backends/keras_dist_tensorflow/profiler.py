"""TensorFlow's profiler."""

import contextlib

import tensorflow as tf

from keras_dist.plugins import Profiler
from keras_dist_tensorflow.cluster import local_devices


class TensorFlowProfiler(Profiler):
    """`tf.profiler.experimental`, which writes files of XProf."""

    def start(self, folder: str) -> None:
        _wait()
        tf.profiler.experimental.start(folder)

    def stop(self) -> None:
        _wait()
        tf.profiler.experimental.stop()

    def step(self, number: int) -> contextlib.AbstractContextManager[object]:
        step: contextlib.AbstractContextManager[object] = (
            tf.profiler.experimental.Trace("train", step_num=number, _r=1)
        )
        return step


def _wait() -> None:
    """Waits for this process' GPUs; the CPU computes at once."""
    # `tf.test.experimental.sync_devices` can't be used in a cluster.
    for device in local_devices("GPU"):
        with tf.device(device.name):
            tf.raw_ops.SyncDevice()

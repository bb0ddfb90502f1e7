"""The loops and counts that `keras-dist bench` compares with on TensorFlow."""

import gc
from collections.abc import Callable

import keras
import tensorflow as tf

from keras_dist.bench.benchmarks import Benchmarks
from keras_dist.bench.fit_loops import FitLoop
from keras_dist.bench.fit_loops import ModelLoop
from keras_dist.bench.loops import Loop
from keras_dist.bench.loops import Setting
from keras_dist.bench.native.tensorflow.fit import CustomLoop
from keras_dist.bench.native.tensorflow.loops import GraphLoop
from keras_dist.bench.native.tensorflow.loops import native_strategy
from keras_dist.bench.native.tensorflow.workers import TensorFlowNativeWorkers
from keras_dist.bench.tasks import Task
from keras_dist.core.device import Device
from keras_dist.core.device import parse_device


class TensorFlowBenchmarks(Benchmarks):
    """Loops in `tf.function`, and `fit`, under `tf.distribute`."""

    loop_text = (
        "tf.function around a Keras model and optimizer, as the guides have "
        "it; with several devices in tf.distribute.MirroredStrategy, on CPUs "
        "with ReductionToOneDevice."
    )
    fits_text = (
        "Mirrored is `fit` under tf.distribute.MirroredStrategy, on CPUs with "
        "ReductionToOneDevice; loop is a tf.function around `strategy.run` in "
        "it, as the guides have it, over a distributed tf.data.Dataset."
    )
    live_bytes_text = (
        "Measured: every live `tf.Variable` of the process and every eager "
        "tensor."
    )
    native_workers = TensorFlowNativeWorkers

    def native_loop(self, setting: Setting) -> Loop:
        return GraphLoop(setting)

    def native_fits(
        self, task: Task, devices: tuple[str, ...]
    ) -> dict[str, Callable[[], ModelLoop]]:
        strategy = native_strategy(devices)
        return {
            "Mirrored": lambda: FitLoop(task, strategy.scope),
            "loop": lambda: CustomLoop(task, strategy),
        }

    def live_bytes(self, model: keras.Model) -> dict[Device, int]:
        totals: dict[Device, int] = {}
        seen = set()
        for each in gc.get_objects():
            # Not `isinstance`, which makes lazy modules load themselves.
            kind = type(each)
            if issubclass(kind, tf.Variable):
                if issubclass(kind, tf.distribute.DistributedValues):
                    continue  # its components are variables too
                each, tensor = each, each.handle
            elif issubclass(kind, tf.Tensor):
                tensor = each
            else:
                continue
            if tf.is_symbolic_tensor(tensor) or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            if each.dtype.size and each.dtype not in (tf.resource, tf.variant):
                name = parse_device(each.device)
                num_bytes = each.shape.num_elements() * each.dtype.size
                totals[name] = totals.get(name, 0) + num_bytes
        return totals

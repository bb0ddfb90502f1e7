"""The native loops of `keras-dist bench workers` on TensorFlow."""

import itertools
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from tensorflow.python.eager import context

from keras_dist.bench.benchmarks import NativeWorkers
from keras_dist.bench.loops import LEARNING_RATE
from keras_dist.bench.loops import Loop
from keras_dist.bench.loops import Setting
from keras_dist.bench.portable import build_model
from keras_dist.bench.worker_loops import rows_of
from keras_dist.core.plan import Cluster
from keras_dist.plugin.workers import Workers


class CustomWorkersLoop(Loop):
    """A tf.function around a Keras model, in tf.distribute.

    It trains on the rows of worker `worker`.
    """

    def __init__(self, setting: Setting, worker: int, strategy: Any) -> None:
        self._rows = setting.size.rows
        self._batches = rows_of(setting, worker)
        self._strategy = strategy
        with strategy.scope():
            self._model = build_model(setting)
            self._optimizer = keras.optimizers.Adam(LEARNING_RATE)
            self._optimizer.build(self._model.trainable_variables)
        self._step = tf.function(self._whole_step)

    def _whole_step(self, x: Any, y: Any) -> Any:
        loss = self._strategy.run(self._replica_step, args=(x, y))
        return loss * self._strategy.num_replicas_in_sync

    def _replica_step(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = self._model(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(
                y, logits, from_logits=True
            )
            loss = tf.nn.compute_average_loss(
                losses, global_batch_size=self._rows
            )
        variables = self._model.trainable_variables
        gradients = tape.gradient(loss, variables)
        self._optimizer.apply(gradients, variables)
        return loss

    def run(self, steps: int) -> float:
        step = self._step
        for x, y in itertools.islice(itertools.cycle(self._batches), steps):
            loss = step(tf.constant(x), tf.constant(y))
        return float(loss)


class TensorFlowNativeWorkers(NativeWorkers):
    """One `tf.distribute.MultiWorkerMirroredStrategy` for all loops.

    It shares the runtime of keras_dist's workers.
    """

    text = (
        "tf.function around a Keras model and optimizer, in "
        "tf.distribute.MultiWorkerMirroredStrategy, which shares our "
        "runtime; each process takes its rows of NumPy batches."
    )

    def __init__(self, workers: Workers) -> None:
        super().__init__(workers)
        # A process has one runtime, and a second server would end it.
        with mock.patch.object(context.context(), "enable_collective_ops"):
            self._strategy = tf.distribute.MultiWorkerMirroredStrategy(
                _resolver(workers.cluster)
            )

    def loop(self, setting: Setting) -> Loop:
        return CustomWorkersLoop(setting, self.worker, self._strategy)


def _resolver(cluster: Cluster) -> Any:
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(cluster.addresses)}),
        task_type="worker",
        task_id=cluster.index,
        rpc_layer="grpc",
    )

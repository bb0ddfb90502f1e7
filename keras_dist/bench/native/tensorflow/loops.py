"""The native loop of `keras-dist bench loops` on TensorFlow."""

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.bench.loops import LEARNING_RATE
from keras_dist.bench.loops import Loop
from keras_dist.bench.loops import Setting
from keras_dist.bench.portable import build_model


class GraphLoop(Loop):
    """A tf.function and, with several devices, tf.distribute."""

    def __init__(self, setting: Setting) -> None:
        self._rows = setting.size.rows
        self._strategy: Any = None
        scope: Any = tf.device(setting.devices[0])
        if setting.num_replicas > 1:
            self._strategy = native_strategy(setting.devices)
            scope = self._strategy.scope()
        with scope:
            self._model = build_model(setting)
            self._optimizer = keras.optimizers.Adam(LEARNING_RATE)
            self._optimizer.build(self._model.trainable_variables)
            self._batches = [
                (self._placed(x), self._placed(y)) for x, y in setting.batches()
            ]
        self._device = (
            contextlib.nullcontext()
            if self._strategy
            else tf.device(setting.devices[0])
        )
        self._step = tf.function(self._whole_step)

    def _placed(self, array: Any) -> Any:
        if self._strategy is None:
            return tf.constant(array)
        each = len(array) // self._strategy.num_replicas_in_sync

        def rows_of(context: Any) -> Any:
            start = context.replica_id_in_sync_group * each
            return tf.constant(array[start : start + each])

        return self._strategy.experimental_distribute_values_from_function(
            rows_of
        )

    def _whole_step(self, x: Any, y: Any) -> Any:
        if self._strategy is None:
            return self._replica_step(x, y)
        losses = self._strategy.run(self._replica_step, args=(x, y))
        return self._strategy.reduce("SUM", losses, axis=None)

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
        with self._device:
            for x, y in itertools.islice(itertools.cycle(self._batches), steps):
                loss = step(x, y)
        return float(loss)


def native_strategy(devices: Sequence[str]) -> Any:
    """Returns a `tf.distribute.MirroredStrategy` on devices."""
    on_cpu = devices[0].startswith("cpu")
    return tf.distribute.MirroredStrategy(
        list(devices),
        # On CPUs, the default's collectives of a second model in the process
        # can be mistaken for those of the first.
        tf.distribute.ReductionToOneDevice() if on_cpu else None,
    )

"""The native training loops of `keras-dist bench fit` on TensorFlow."""

from typing import Any

import tensorflow as tf

from keras_dist.bench.fit_loops import ModelLoop
from keras_dist.bench.tasks import Task


class CustomLoop(ModelLoop):
    """A tf.function around a Keras model, in tf.distribute."""

    def __init__(self, task: Task, strategy: Any) -> None:
        with strategy.scope():
            super().__init__(task.model(), step=CustomLoop._replica_step)
        self._task = task
        self._strategy = strategy
        # No autograph: it would run a converted copy of the step, and calls of
        # the step itself are counted.
        self._step = tf.function(self._whole_step, autograph=False)

    def _whole_step(self, *batch: Any) -> Any:
        losses = self._strategy.run(self._replica_step, args=batch)
        return self._strategy.reduce("SUM", losses, axis=None)

    def _replica_step(self, *rows: Any) -> Any:
        model = self.model
        x, y = tf.nest.pack_sequence_as(self._task.data(1), rows)
        with tf.GradientTape() as tape:
            # In a native strategy Keras divides the loss by the number of
            # replicas itself.
            loss = model.compute_loss(x, y, model(x, training=True))
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    def run(self, steps: int) -> float:
        # `from_tensor_slices` takes a list of inputs for one array.
        arrays = tuple(tf.nest.flatten(self._task.data(steps)))
        dataset = tf.data.Dataset.from_tensor_slices(arrays)
        batches = dataset.batch(self._task.size.rows, drop_remainder=True)
        loss = None
        for batch in self._strategy.experimental_distribute_dataset(batches):
            loss = self._step(*batch)
        return float(loss)  # type: ignore[arg-type]

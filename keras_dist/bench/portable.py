"""The portable loop, as README shows it, and its variants."""

import itertools
from typing import Any

import keras

from keras_dist.bench.loops import LEARNING_RATE
from keras_dist.bench.loops import Loop
from keras_dist.bench.loops import Setting
from keras_dist.replica.average_loss import compute_average_loss
from keras_dist.replica.function import function
from keras_dist.replica.gradients import value_and_grad
from keras_dist.strategies.mirrored import MirroredStrategy
from keras_dist.strategies.scan import scan_steps
from keras_dist.strategies.strategy import Strategy

SCANNED_STEPS = 10


def build_model(setting: Setting) -> keras.Model:
    """Returns the setting's model in Keras, with its weights."""
    widths = setting.size.widths
    model = keras.Sequential(
        [
            keras.Input(widths[:1]),
            *(keras.layers.Dense(n, "relu") for n in widths[1:-1]),
            keras.layers.Dense(widths[-1]),
        ]
    )
    model.set_weights(setting.weights())
    return model


class PortableLoop(Loop):
    """A loop that calls `strategy.run` of a compiled step for each batch.

    Each batch is cut to `rows`, if that is given. The default strategy is a
    `MirroredStrategy` of the setting's devices.
    """

    def __init__(
        self,
        setting: Setting,
        rows: int | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        self.strategy = strategy or MirroredStrategy(setting.devices)
        # How often Python ran the step, on any replica.
        self.traces = 0
        self._global_batch = rows or setting.size.rows
        with self.strategy.scope():
            self._model = build_model(setting)
            self._optimizer = keras.optimizers.Adam(LEARNING_RATE)
            self._optimizer.build(self._model.trainable_variables)
        batches = setting.batches(rows)
        self.batches = list(
            self.strategy.experimental_distribute_dataset(batches)
        )
        self.step = function(self._train_step)

    def _train_step(self, x: Any, y: Any) -> Any:
        self.traces += 1

        def loss_fn() -> Any:
            logits = self._model(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(
                y, logits, from_logits=True
            )
            return compute_average_loss(
                losses, global_batch_size=self._global_batch
            )

        variables = self._model.trainable_variables
        loss, gradients = value_and_grad(loss_fn, variables)
        self._optimizer.apply(gradients, variables)
        return loss

    def run(self, steps: int) -> float:
        run, step = self.strategy.run, self.step
        for batch in itertools.islice(itertools.cycle(self.batches), steps):
            loss = run(step, args=batch)
        return float(self.total(loss))

    def total(self, loss: Any) -> Any:
        """Returns the sum of the replicas' losses."""
        return self.strategy.reduce("SUM", loss, axis=None)


class ReducedLoop(PortableLoop):
    """A portable loop that reduces the loss in each step, not only the last."""

    def run(self, steps: int) -> float:
        run, step = self.strategy.run, self.step
        for batch in itertools.islice(itertools.cycle(self.batches), steps):
            loss = self.total(run(step, args=batch))
        return float(loss)


class ScannedLoop(PortableLoop):
    """A portable loop with `SCANNED_STEPS` steps in a call.

    It runs a multiple of so many steps.
    """

    def run(self, steps: int) -> float:
        batches = itertools.cycle(self.batches)
        with self.strategy.scope():
            for _ in range(steps // SCANNED_STEPS):
                losses = scan_steps(self.step, batches, SCANNED_STEPS)
        return float(keras.ops.convert_to_numpy(self.total(losses))[-1])

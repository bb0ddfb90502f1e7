"""The portable loop, as the guide shows it, beside the framework's own."""

import itertools

import keras

import keras_dist
from bench import settings
from bench.native import native
from keras_dist.bench import measure

NOTE = (
    "Ours: `strategy.run` of a `keras_dist.function`. Reduced: the same, and "
    "the loss is reduced in each step. Ragged: the batch has one row less, "
    "so shares have two sizes. Scan: `scan_steps` of "
    f"{settings.SCANNED_STEPS}. Keras: a Keras model in the framework's own "
    "loop."
)


class PortableLoop(settings.StepLoop):
    """A loop that calls `strategy.run` of a compiled step for each batch."""

    def __init__(self, setting, rows=None, strategy=None):
        self.strategy = strategy or keras_dist.MirroredStrategy(setting.devices)
        self._global_batch = rows or setting.rows
        with self.strategy.scope():
            self._model, self._optimizer = setting.model_and_optimizer()
        batches = self.strategy.experimental_distribute_dataset(
            setting.batches(rows)
        )
        super().__init__(keras_dist.function(self._train_step), list(batches))

    def _train_step(self, x, y):
        def loss_fn():
            return keras_dist.compute_average_loss(
                settings.row_losses(y, self._model(x, training=True)),
                global_batch_size=self._global_batch,
            )

        variables = self._model.trainable_variables
        loss, gradients = keras_dist.value_and_grad(loss_fn, variables)
        self._optimizer.apply(gradients, variables)
        return loss

    def __call__(self, steps):
        run, step = self.strategy.run, self.step
        for batch in self.feed(steps):
            loss = run(step, args=batch)
        return float(self.total(loss))

    def total(self, loss):
        return self.strategy.reduce("SUM", loss, axis=None)


class ReducedLoop(PortableLoop):
    """A portable loop that reduces the loss in each step, not only the last."""

    def __call__(self, steps):
        run, step = self.strategy.run, self.step
        for batch in self.feed(steps):
            loss = self.total(run(step, args=batch))
        return float(loss)


class ScannedLoop(PortableLoop):
    """A portable loop with `SCANNED_STEPS` steps in a call."""

    def __call__(self, steps):
        batches = itertools.cycle(self.batches)
        with self.strategy.scope():
            for _ in range(steps // settings.SCANNED_STEPS):
                losses = keras_dist.scan_steps(
                    self.step, batches, settings.SCANNED_STEPS
                )
        return float(keras.ops.convert_to_numpy(self.total(losses))[-1])


def run(options):
    measured = []
    for setting in settings.on_replicas(options):
        with measure.progress(setting.title, options.rounds) as on_round:
            measured.append(_measured(setting, options, on_round))
    return settings.published("loops", measured, native().LOOP_TEXT, NOTE)


def _measured(setting, options, on_round):
    # Neighbors are measured one after the other.
    arms = {
        "native": native().native_loop(setting),
        "ours": PortableLoop(setting),
        measure.AGAIN: native().native_loop(setting),
        "scan": ScannedLoop(setting),
    }
    if setting.num_replicas > 1:
        arms["ragged"] = PortableLoop(setting, setting.rows - 1)
        arms["reduced"] = ReducedLoop(setting)
    arms |= native().other_loops(setting)
    losses = {name: arm(settings.COUNTED_STEPS) for name, arm in arms.items()}
    calls = {
        name: measure.calls_a_step(arms[name], steps=settings.COUNTED_STEPS)[0]
        for name in ("ours", "native")
    }
    steps = settings.steps_in(arms["native"], options.block_ms / 1e3)
    times = measure.time_arms(arms, steps, options.rounds, on_round)
    measured = settings.measurement(
        setting, steps, times, losses, {"calls": calls}
    )
    settings.check_losses(measured, "ragged")
    return measured

"""The portable loop, as the guide shows it, beside the framework's own."""

import functools
import itertools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist.bench import loops
from keras_dist.bench import measure
from keras_dist.bench.benchmarks import Benchmarks
from keras_dist.bench.benchmarks import get_benchmarks
from keras_dist.bench.report import Output
from keras_dist.bench.report import report_of
from keras_dist.replica.average_loss import compute_average_loss
from keras_dist.replica.function import function
from keras_dist.replica.gradients import value_and_grad
from keras_dist.strategies.mirrored import MirroredStrategy
from keras_dist.strategies.scan import scan_steps
from keras_dist.strategies.strategy import Strategy

ARMS = (
    "Ours: `strategy.run` of a `keras_dist.function`. Reduced: the same, and "
    "the loss is reduced in each step. Ragged: the batch has one row less, "
    "so shares have two sizes. Scan: `scan_steps` of "
    f"{measure.SCANNED_STEPS}. Keras: a Keras model in the framework's own "
    "loop."
)


class PortableLoop(loops.StepLoop):
    """A loop that calls `strategy.run` of a compiled step for each batch."""

    def __init__(
        self,
        setting: loops.Setting,
        rows: int | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        self.strategy = strategy or MirroredStrategy(setting.devices)
        # How often Python ran the step, on any replica.
        self.traces = 0
        self._global_batch = rows or setting.size.rows
        with self.strategy.scope():
            self._model, self._optimizer = setting.model_and_optimizer()
        batches = self.strategy.experimental_distribute_dataset(
            setting.batches(rows)
        )
        super().__init__(function(self._train_step), list(batches))

    def _train_step(self, x: Any, y: Any) -> Any:
        self.traces += 1

        def loss_fn() -> Any:
            return compute_average_loss(
                loops.row_losses(y, self._model(x, training=True)),
                global_batch_size=self._global_batch,
            )

        variables = self._model.trainable_variables
        loss, gradients = value_and_grad(loss_fn, variables)
        self._optimizer.apply(gradients, variables)
        return loss

    def run(self, steps: int) -> float:
        run, step = self.strategy.run, self.step
        for batch in self.feed(steps):
            loss = run(step, args=batch)
        return float(self.total(loss))

    def total(self, loss: Any) -> Any:
        return self.strategy.reduce("SUM", loss, axis=None)


class ReducedLoop(PortableLoop):
    """A portable loop that reduces the loss in each step, not only the last."""

    def run(self, steps: int) -> float:
        run, step = self.strategy.run, self.step
        for batch in self.feed(steps):
            loss = self.total(run(step, args=batch))
        return float(loss)


class ScannedLoop(PortableLoop):
    """A portable loop with `SCANNED_STEPS` steps in a call."""

    def run(self, steps: int) -> float:
        batches = itertools.cycle(self.batches)
        with self.strategy.scope():
            for _ in range(steps // measure.SCANNED_STEPS):
                losses = scan_steps(self.step, batches, measure.SCANNED_STEPS)
        return float(keras.ops.convert_to_numpy(self.total(losses))[-1])


def run_loops(
    replicas: Sequence[int] | None,
    models: Sequence[str],
    device_type: str,
    rounds: int,
    seconds: float,
    output: Output,
) -> None:
    """Measures the portable loop, and publishes the report."""
    sizes = [loops.size_of(name) for name in models]
    groups = loops.groups_of_devices(replicas, device_type)
    benchmarks = get_benchmarks("has no loop to compare with")
    jobs = {
        setting.title: functools.partial(
            measure_loops, benchmarks, setting, rounds, seconds
        )
        for setting in loops.settings_of(sizes, groups)
    }
    measured = measure.in_turn(jobs, rounds)
    output.publish(report_of("loops", measured, benchmarks.loop_text, [ARMS]))


def measure_loops(
    benchmarks: Benchmarks,
    setting: loops.Setting,
    rounds: int,
    seconds: float,
    on_round: Callable[[], None],
) -> measure.Measurement:
    """Measures all arms in blocks that alternate."""
    ours = PortableLoop(setting)
    # Neighbors are measured one after the other.
    arms: dict[str, loops.Loop] = {
        "native": benchmarks.native_loop(setting),
        "ours": ours,
        "again": benchmarks.native_loop(setting),
        "scan": ScannedLoop(setting),
    }
    if setting.num_replicas > 1:
        arms["ragged"] = PortableLoop(setting, setting.size.rows - 1)
        arms["reduced"] = ReducedLoop(setting)
    arms |= benchmarks.other_loops(setting)
    losses = {
        name: arm.run(measure.COUNTED_STEPS) for name, arm in arms.items()
    }
    measure.check_losses(losses)
    counts = count(ours, arms["native"])
    steps = measure.steps_in(arms["native"], seconds)
    times = measure.time_arms(arms, steps, rounds, on_round)
    return measure.Measurement(
        setting, steps, times, losses, counts, measure.pairs_of(arms)
    )


def count(
    ours: PortableLoop, native: loops.Loop
) -> dict[str, dict[str, float | None]]:
    """Counts Python calls and traces of warm loops."""
    before = ours.traces
    calls = measure.calls_a_step(ours, measure.COUNTED_STEPS)
    traces = ours.traces - before
    num_runs = 3 * measure.COUNTED_STEPS * ours.strategy.num_replicas_in_sync
    native_calls = measure.calls_a_step(native, measure.COUNTED_STEPS)
    return {
        "calls": {"ours": calls, "native": native_calls},
        # Python runs each eager step: there are no traces to count.
        "traced_again": {"ours": None if traces == num_runs else traces},
    }

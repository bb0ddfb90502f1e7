"""`fit` with and without a strategy, beside the framework's own training."""

import contextlib
import functools
import gc
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence

import keras

from keras_dist.bench import loops
from keras_dist.bench import measure
from keras_dist.bench.benchmarks import Benchmarks
from keras_dist.bench.benchmarks import get_benchmarks
from keras_dist.bench.report import Output
from keras_dist.bench.report import report_of
from keras_dist.bench.tasks import FitLoop
from keras_dist.bench.tasks import ModelLoop
from keras_dist.bench.tasks import Task
from keras_dist.bench.tasks import on_device
from keras_dist.bench.tasks import task_of
from keras_dist.bench.tasks import users_task
from keras_dist.planning.estimates import bytes_sent
from keras_dist.strategies.mirrored import MirroredStrategy
from keras_dist.tools import counting

ARMS = (
    "Ours: `fit` under `MirroredStrategy`. Keras: `fit` without a strategy, "
    "on the first device. All are fed with the same NumPy arrays. Python "
    "calls are counted in the thread that trains. Collectives: on PyTorch, "
    "where replicas are threads, how often they wait for each other. Traced "
    "again: how often Python ran the step after the warm-up. To send: the "
    "bytes that `keras-dist plan` computes. Live: the bytes that an arm "
    "added on all devices."
)

# Plain Keras, which every backend can run.
BASE = "Keras"
OURS = "ours"


def run_fit(
    replicas: Sequence[int] | None,
    models: Sequence[str],
    users_model: tuple[str, int] | None,
    device_type: str,
    rounds: int,
    seconds: float,
    output: Output,
) -> None:
    """Measures `fit` with and without a strategy, and publishes the report."""
    sizes = [loops.size_of(name) for name in models]
    groups = loops.groups_of_devices(replicas, device_type)
    benchmarks = get_benchmarks("has no training to compare with")
    tasks = [task_of(size) for size in sizes]
    if users_model is not None:
        tasks.append(users_task(*users_model))
    jobs = {
        setting.title: functools.partial(
            measure_fit, benchmarks, task, setting, rounds, seconds
        )
        for task in tasks
        for setting in loops.settings_of([task.size], groups)
    }
    measured = measure.in_turn(jobs, rounds)
    text = [ARMS, *_notes(tasks, measured)]
    if benchmarks.live_bytes_text is not None:
        text.append(benchmarks.live_bytes_text)
    output.publish(report_of("fit", measured, benchmarks.fits_text, text))


def _notes(
    tasks: Sequence[Task], measured: Sequence[measure.Measurement]
) -> list[str]:
    """Returns sentences on losses of users' models that differ between arms."""
    known = {task.size.name for task in tasks if task.is_known}
    notes = []
    for each in measured:
        far = measure.far_losses(each.losses, each.base)
        if far and each.setting.size.name not in known:
            others = ", ".join(f"{arm} {far[arm]:.4f}" for arm in far)
            notes.append(
                f"Losses after the first steps of {each.setting.title} "
                f"differ: {each.base} {each.losses[each.base]:.4f}, {others}. "
                "In our arms, the cause is a layer that draws random "
                "numbers, or a bug. The framework's own arms may differ for "
                "other reasons: some normalize batches by one replica's rows "
                "only."
            )
    return notes


def measure_fit(
    benchmarks: Benchmarks,
    task: Task,
    setting: loops.Setting,
    rounds: int,
    seconds: float,
    on_round: Callable[[], None],
) -> measure.Measurement:
    """Measures all arms in blocks that alternate."""
    counts = Counts(benchmarks, setting.num_replicas)
    placed = functools.partial(on_device, setting.devices[0])
    plain = functools.partial(FitLoop, task, placed, placed)
    # Neighbors are measured one after the other.
    makers: dict[str, Callable[[], loops.Loop]] = {
        BASE: plain,
        OURS: lambda: FitLoop(task, MirroredStrategy(setting.devices).scope),
        measure.AGAIN: plain,
        **benchmarks.native_fits(task, setting.devices),
    }
    arms, losses = {}, {}
    with contextlib.ExitStack() as stack:
        for name, make in makers.items():
            arms[name], losses[name] = counts.warm(name, make)
            stack.callback(arms[name].close)
        if task.is_known:
            measure.check_losses(losses, others=(), base=BASE)
        for name, arm in arms.items():
            if name != measure.AGAIN and isinstance(arm, ModelLoop):
                counts.count(name, arm)
        counts.numbers["planned_bytes"][OURS] = _planned(arms[OURS], setting)
        steps = measure.steps_that_take(arms[BASE], seconds)
        # The data that all arms share is made before the first one is timed.
        task.data(steps)
        times = measure.time_arms(arms, steps, rounds, on_round)
    pairs = [(OURS, name) for name in arms if name not in (OURS, measure.AGAIN)]
    return measure.Measurement(
        setting, steps, times, losses, counts.numbers, pairs, BASE
    )


class Counts:
    """Counts of each arm; `numbers` has the form of `Measurement.counts`."""

    def __init__(self, benchmarks: Benchmarks, num_replicas: int) -> None:
        self.numbers: dict[str, dict[str, float | None]] = defaultdict(dict)
        self._benchmarks = benchmarks
        self._num_replicas = num_replicas

    def warm(
        self, name: str, make: Callable[[], loops.Loop]
    ) -> tuple[loops.Loop, float]:
        """Makes an arm and warms it up; returns it with its loss."""
        before = self._live_bytes(keras.Sequential([keras.Input((1,))]))
        arm = make()
        if not isinstance(arm, ModelLoop):
            # Calls in other processes are not counted.
            arm.run(measure.FEW)
            return arm, arm.run(1)
        self.numbers["traces"][name] = _traces(arm)
        loss = arm.run(1)
        after = self._live_bytes(arm.model)
        held = None if before is None or after is None else after - before
        self.numbers["live_bytes"][name] = held
        return arm, loss

    def count(self, name: str, arm: ModelLoop) -> None:
        """Counts traces, calls and collectives of a warm arm."""
        self.numbers["traced_again"][name] = _traces(arm)
        self.numbers["calls"][name] = measure.calls_a_step(arm, measure.FEW)
        self.numbers["collectives"][name] = measure.a_step(
            lambda steps: self._benchmarks.fit_collectives(
                arm, steps, self._num_replicas
            ),
            2,
        )

    def _live_bytes(self, model: keras.Model) -> int | None:
        gc.collect()
        held = self._benchmarks.live_bytes(model)
        return None if held is None else sum(held.values())


def _traces(arm: ModelLoop) -> int | None:
    """Returns how often Python ran the step, or `None` if it runs eagerly."""
    with measure.Profile(arm.step_code) as profile:
        arm.run(measure.FEW)
    # Python runs each eager step: there are no traces to count.
    return None if profile.of_wanted >= measure.FEW else profile.of_wanted


def _planned(arm: loops.Loop, setting: loops.Setting) -> int:
    """Returns the bytes sent in a step that `keras-dist plan` computes."""
    assert isinstance(arm, ModelLoop)
    placement = counting.placement_of(MirroredStrategy(setting.devices).plan)
    load, kept = counting.load_of(arm.model), counting.kept_of(arm.model)
    return bytes_sent(load, placement, kept)

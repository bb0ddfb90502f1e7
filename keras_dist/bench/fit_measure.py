"""The measurement of `fit` in one setting; its arms take turns."""

import contextlib
import functools
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import keras

from keras_dist.bench.benchmarks import Benchmarks
from keras_dist.bench.fit_loops import FitLoop
from keras_dist.bench.fit_loops import ModelLoop
from keras_dist.bench.fit_loops import on_device
from keras_dist.bench.loops import Loop
from keras_dist.bench.loops import Setting
from keras_dist.bench.measure import check_losses
from keras_dist.bench.measure import time_arms
from keras_dist.bench.measurement import AGAIN
from keras_dist.bench.measurement import Measurement
from keras_dist.bench.profile import Profile
from keras_dist.bench.profile import a_step
from keras_dist.bench.profile import calls_a_step
from keras_dist.bench.tasks import Task
from keras_dist.planning.traffic import transfers
from keras_dist.strategies.mirrored import MirroredStrategy
from keras_dist.tools.summaries.counting import kept_of
from keras_dist.tools.summaries.counting import load_of
from keras_dist.tools.summaries.counting import placement_of

# Plain Keras, which every backend can run.
BASE = "Keras"
OURS = "ours"

# Steps that warm an arm up, and steps in which calls are counted.
FEW = 8


@dataclass
class Counted:
    """Counts of each arm, in the form of `Measurement.counts`."""

    numbers: dict[str, dict[str, float | None]] = field(default_factory=dict)

    def add(self, what: str, arm: str, number: float | None) -> None:
        self.numbers.setdefault(what, {})[arm] = number


def measure_fit(
    benchmarks: Benchmarks,
    task: Task,
    devices: tuple[str, ...],
    rounds: int,
    seconds: float,
    on_round: Callable[[], None],
) -> Measurement:
    """Measures all arms in blocks that alternate.

    `devices` has one device for each replica. A block of plain Keras takes
    about `seconds`. `on_round` is called after each round.

    Raises:
        LossMismatchError: If losses differ that must not.
    """
    counted = Counted()
    arms, losses = {}, {}
    with contextlib.ExitStack() as stack:
        for name, make in _makers(benchmarks, task, devices).items():
            arms[name], losses[name] = _warm(benchmarks, name, make, counted)
            stack.callback(arms[name].close)
        if task.is_known:
            check_losses(losses, others=(), base=BASE)
        for name, arm in arms.items():
            if name != AGAIN and isinstance(arm, ModelLoop):
                _count(benchmarks, len(devices), name, arm, counted)
        counted.add("planned_bytes", OURS, _planned(arms[OURS], devices))
        steps = steps_that_take(arms[BASE], seconds)
        # The data that all arms share is made before the first one is timed.
        task.data(steps)
        times = time_arms(arms, steps, rounds, on_round)
    return Measurement(
        Setting(task.size, devices),
        steps,
        times,
        losses,
        counted.numbers,
        [(OURS, name) for name in arms if name not in (OURS, AGAIN)],
        BASE,
    )


def _makers(
    benchmarks: Benchmarks, task: Task, devices: tuple[str, ...]
) -> dict[str, Callable[[], Loop]]:
    """Returns functions that make the arms, by name.

    Neighbors are measured one after the other.
    """
    placed = functools.partial(on_device, devices[0])
    plain = functools.partial(FitLoop, task, placed, placed)
    return {
        BASE: plain,
        OURS: lambda: FitLoop(task, MirroredStrategy(devices).scope),
        AGAIN: plain,
        **benchmarks.native_fits(task, devices),
    }


def _warm(
    benchmarks: Benchmarks,
    name: str,
    make: Callable[[], Loop],
    counted: Counted,
) -> tuple[Loop, float]:
    """Makes an arm and warms it up; returns it with its loss."""
    before = _live_bytes(benchmarks, keras.Sequential([keras.Input((1,))]))
    arm = make()
    if not isinstance(arm, ModelLoop):
        # Calls in other processes are not counted.
        arm.run(FEW)
        return arm, arm.run(1)
    with Profile(arm.step_code) as profile:
        arm.run(FEW)
    # Python runs each eager step: there are no traces to count.
    traces = None if profile.of_wanted >= FEW else profile.of_wanted
    counted.add("traces", name, traces)
    loss = arm.run(1)
    after = _live_bytes(benchmarks, arm.model)
    held = None if before is None or after is None else after - before
    counted.add("live_bytes", name, held)
    return arm, loss


def _count(
    benchmarks: Benchmarks,
    num_replicas: int,
    name: str,
    arm: ModelLoop,
    counted: Counted,
) -> None:
    with Profile(arm.step_code) as profile:
        arm.run(FEW)
    traces = None if profile.of_wanted >= FEW else profile.of_wanted
    counted.add("traced_again", name, traces)
    counted.add("calls", name, calls_a_step(arm, FEW))

    def collectives(steps: int) -> int | None:
        return benchmarks.fit_collectives(arm, steps, num_replicas)

    counted.add("collectives", name, a_step(collectives, 2))


def _planned(arm: Loop, devices: tuple[str, ...]) -> int:
    """Returns the bytes sent in a step that `keras-dist plan` computes."""
    assert isinstance(arm, ModelLoop)
    model = arm.model
    placement = placement_of(MirroredStrategy(devices).plan)
    sent = transfers(load_of(model), placement, kept_of(model))
    return sum(each.total for each in sent)


def _live_bytes(benchmarks: Benchmarks, model: Any) -> int | None:
    """Returns the bytes that are alive on all devices of this process.

    It is `None` if the framework can't count them.
    """
    gc.collect()
    held = benchmarks.live_bytes(model)
    return None if held is None else sum(held.values())


def steps_that_take(arm: Loop, seconds: float) -> int:
    """Returns the number of steps that take `seconds`, besides a call's cost.

    On TensorFlow, a call of `fit` costs as much as many steps. So the time that
    twice as many steps add is what counts.
    """

    def taken_by(steps: int) -> float:
        start = time.perf_counter()
        arm.run(steps)
        return time.perf_counter() - start

    steps = FEW
    before = taken_by(steps)
    while True:
        after = taken_by(2 * steps)
        added = after - before
        if added >= seconds / 2:
            return max(FEW, round(steps * seconds / added))
        if steps >= 2**16:
            return steps
        steps, before = 2 * steps, after

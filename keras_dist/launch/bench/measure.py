"""Measures the arms of one setting, in turns."""

import sys
import time
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from typing import Generic
from typing import TypeVar

import numpy as np

from keras_dist.errors import KerasDistError
from keras_dist.launch.bench.loops import BenchmarksLoops
from keras_dist.launch.bench.loops import Loop
from keras_dist.launch.bench.loops import Setting
from keras_dist.launch.bench.portable import SCANNED_STEPS
from keras_dist.launch.bench.portable import PortableLoop
from keras_dist.launch.bench.portable import ReducedLoop
from keras_dist.launch.bench.portable import ScannedLoop
from keras_dist.launch.bench.ratios import Ratio
from keras_dist.launch.bench.ratios import verdict

C = TypeVar("C")

COUNTED_STEPS = 20

# What is there on every backend; `BenchmarksLoops.other_loops` adds to it.
_ARMS = {"native", "ours", "again", "scan", "ragged", "reduced"}

# Early losses of arms that compute the same differ by less. It is not only
# rounding: PyTorch's Adam adds its epsilon elsewhere than Keras'.
_TOLERANCE = 1e-2


class LossMismatchError(KerasDistError, RuntimeError):
    """Two arms don't compute the same, so that times mean nothing."""


@dataclass(frozen=True)
class Counts:
    """What a step costs, whatever the machine.

    Args:
        calls: Float, Python functions that a step of ours calls in the thread
            that it is called in.
        native_calls: Float, likewise of the native loop.
        traces: Integer, how often the step was traced again after warm-up;
            `None` where it is not traced but run.
    """

    calls: float
    native_calls: float
    traces: int | None


@dataclass(frozen=True)
class Comparison:
    """A row of the summary."""

    name: str
    ratio: Ratio
    verdict: str


@dataclass(frozen=True)
class Measurement(Generic[C]):
    """All there is about one setting.

    Args:
        setting: `Setting`.
        steps: Integer, steps in a block.
        times: Dict from arm to the seconds a step took, one a round.
        losses: Dict from arm to the loss after the first steps.
        counts: What was counted, as a dataclass.
    """

    setting: Setting
    steps: int
    times: dict[str, list[float]]
    losses: dict[str, float]
    counts: C

    @property
    def noise(self) -> Ratio:
        """The native loop's copy, against the native loop."""
        return Ratio.of(self.times["again"], self.times["native"])

    def comparisons(self) -> list[Comparison]:
        """The ratios, ours against the native loop first."""
        # Ours runs between the two; their mean is free of a steady drift.
        native = np.mean([self.times["native"], self.times["again"]], axis=0)
        ours = self.times["ours"]
        pairs: list[tuple[str, str, Any]] = [
            ("ours", "ours/native", native),
            ("reduced", "reduced/native", native),
            ("ragged", "ragged/ours", ours),
            ("scan", "scan/ours", ours),
        ]
        for arm in [arm for arm in self.times if arm not in _ARMS]:
            pairs += [
                (arm, f"{arm}/native", native),
                ("ours", f"ours/{arm}", self.times[arm]),
            ]
        rows = []
        for arm, name, base in pairs:
            if arm in self.times:
                ratio = Ratio.of(self.times[arm], base)
                rows.append(Comparison(name, ratio, verdict(ratio, self.noise)))
        return rows


def build_arms(backend: BenchmarksLoops, setting: Setting) -> dict[str, Loop]:
    """The loops to measure, by name; neighbours are measured in a row."""
    arms: dict[str, Loop] = {
        "native": backend.native_loop(setting),
        "ours": PortableLoop(setting),
        "again": backend.native_loop(setting),
        "scan": ScannedLoop(setting),
    }
    if setting.num_replicas > 1:
        arms["ragged"] = PortableLoop(setting, setting.size.rows - 1)
        arms["reduced"] = ReducedLoop(setting)
    return arms | backend.other_loops(setting)


def measure(
    backend: BenchmarksLoops,
    setting: Setting,
    rounds: int,
    seconds: float,
    on_round: Callable[[], None],
) -> Measurement[Counts]:
    """Measures all arms in blocks that alternate.

    Args:
        backend: `BenchmarksLoops`, whose native loops to compare with.
        setting: `Setting`.
        rounds: Integer, blocks of each arm.
        seconds: Float, what a block of the native loop takes about.
        on_round: Callable, called after each round.

    Raises:
        LossMismatchError: If the arms' losses differ.
    """
    arms = build_arms(backend, setting)
    losses = {name: arm.run(COUNTED_STEPS) for name, arm in arms.items()}
    check_losses(losses)
    ours = arms["ours"]
    assert isinstance(ours, PortableLoop)
    counts = count(ours, arms["native"])
    steps = steps_in(arms["native"], seconds)
    return Measurement(
        setting, steps, time_arms(arms, steps, rounds, on_round), losses, counts
    )


def check_losses(
    losses: Mapping[str, float], others: Collection[str] = ("ragged",)
) -> None:
    """Refuses to compare arms that compute different things.

    Args:
        losses: Mapping from arm to its loss after as many steps.
        others: Collection of the arms that have other rows and may differ.

    Raises:
        LossMismatchError: If one is not that of the native arm.
    """
    expected = losses["native"]
    for name, loss in losses.items():
        # A comparison with NaN is false, so a loss that blew up is refused.
        if name not in others and not (
            abs(loss - expected) <= _TOLERANCE * abs(expected)
        ):
            raise LossMismatchError(
                f"The arm '{name}' computes something else than the native "
                f"loop. Received: a loss of {loss} after {COUNTED_STEPS} "
                f"steps. Expected: {expected}, up to {_TOLERANCE:.0e} of it. "
                "This is a bug; please report it with the versions you use."
            )


def time_arms(
    arms: Mapping[str, Loop],
    steps: int,
    rounds: int,
    on_round: Callable[[], None],
    on_block: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds a step of each arm takes in each round.

    Args:
        arms: Mapping from name to `Loop`.
        steps: Integer, steps in a block.
        rounds: Integer, blocks of each arm.
        on_round: Callable, called after each round.
        on_block: Callable, called before each block.
    """
    times: dict[str, list[float]] = {name: [] for name in arms}
    order = list(arms)
    for _ in range(rounds):
        for name in order:
            on_block()
            start = time.perf_counter()
            arms[name].run(steps)
            times[name].append((time.perf_counter() - start) / steps)
        order.reverse()
        on_round()
    return times


def steps_in(arm: Loop, seconds: float) -> int:
    """How many steps take so long, as a multiple of `SCANNED_STEPS`."""
    seen = []
    for _ in range(3):
        start = time.perf_counter()
        arm.run(COUNTED_STEPS)
        seen.append((time.perf_counter() - start) / COUNTED_STEPS)
    one = sorted(seen)[1]
    return SCANNED_STEPS * max(1, round(seconds / one / SCANNED_STEPS))


def count(ours: PortableLoop, native: Loop) -> Counts:
    """Counts Python calls and traces of warm loops."""
    before = ours.traces
    calls = _calls(ours)
    traces = ours.traces - before
    num_runs = 3 * COUNTED_STEPS * ours.strategy.num_replicas_in_sync
    return Counts(
        calls=calls,
        native_calls=_calls(native),
        traces=None if traces == num_runs else traces,
    )


def _calls(arm: Loop) -> float:
    """Python functions that a step calls in this thread."""
    before = sys.getprofile()
    counted = []
    # The difference is free of what a block costs, however long.
    for steps in (COUNTED_STEPS, 2 * COUNTED_STEPS):
        seen = 0

        def profile(frame: Any, event: str, argument: Any) -> None:
            nonlocal seen
            seen += event == "call"

        sys.setprofile(profile)
        try:
            arm.run(steps)
        finally:
            sys.setprofile(before)
        counted.append(seen)
    return (counted[1] - counted[0]) / COUNTED_STEPS

"""The measuring loop, whose arms take turns, and the meaning of its times."""

import contextlib
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType
from types import FrameType
from typing import TextIO

import numpy as np
from numpy.typing import ArrayLike
from rich.console import Console
from rich.progress import TimeElapsedColumn

from keras_dist.planning.tables import progress_bar

# Trains for a number of steps, waits for them, and returns a loss.
Arm = Callable[[int], float]

# Steps that warm an arm up, and steps in which calls are counted.
FEW = 8

# The largest relative difference of early losses between equivalent arms. It is
# not only rounding: PyTorch's Adam adds its epsilon elsewhere than Keras'.
TOLERANCE = 1e-2

# The ratio of an arm to its copy outside of which the machine was too busy, and
# the largest distance of that ratio's quartiles.
NOISE = (0.97, 1.03)
SPREAD = 0.2
# Quartiles of fewer rounds say nothing.
LEAST_ROUNDS = 5

# The copy of the base.
AGAIN = "again"


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios, with their quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, times: ArrayLike, base: ArrayLike) -> "Ratio":
        """Returns the ratio of times to those of `base` in the same rounds."""
        paired = np.asarray(times) / np.asarray(base)
        low, median, high = np.percentile(paired, [25, 50, 75])
        return cls(float(median), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def verdict(ratio: Ratio, noise: Ratio, rounds: int) -> str:
    """Returns the meaning of a ratio in a word."""
    if rounds < LEAST_ROUNDS:
        return "few rounds"
    least, most = NOISE
    # If rounds don't agree, a median within these limits is luck.
    if not (least <= noise.median <= most) or noise.high - noise.low > SPREAD:
        return "noise"
    if least <= ratio.median <= most or ratio.low <= 1.0 <= ratio.high:
        return "level"
    return "faster" if ratio.median < 1.0 else "slower"


@dataclass(frozen=True)
class Comparison:
    """The ratio of two arms."""

    name: str
    ratio: Ratio
    verdict: str


@dataclass(frozen=True)
class Measurement:
    """All numbers of a model on some devices, one for each replica."""

    model: str
    devices: Sequence[str]
    rows: int  # of a global batch
    steps: int  # of a block
    times: Mapping[str, Sequence[float]]  # of a step, for each arm and round
    losses: Mapping[str, float]  # after the first steps
    counts: Mapping[str, Mapping[str, float | None]]  # by name, then by arm
    pairs: Sequence[tuple[str, str]]
    base: str  # the arm that `AGAIN` is a copy of

    @property
    def noise(self) -> Ratio:
        """The ratio of the base's copy to the base."""
        return Ratio.of(self.times[AGAIN], self.times[self.base])

    def comparisons(self) -> list[Comparison]:
        """Returns the ratio of each pair, with a verdict."""
        # An arm that runs between the base and its copy is compared with their
        # mean, which is free of a steady drift.
        both = [self.times[self.base], self.times[AGAIN]]
        bases = {**self.times, self.base: np.mean(both, axis=0)}
        rows = []
        for arm, other in self.pairs:
            ratio = Ratio.of(self.times[arm], bases[other])
            word = verdict(ratio, self.noise, len(self.times[arm]))
            rows.append(Comparison(f"{arm}/{other}", ratio, word))
        return rows

    def far_losses(self) -> dict[str, float]:
        """Returns the losses that differ from that of the base."""
        expected = self.losses[self.base]
        # A comparison with NaN is false, so a loss that blew up is far.
        return {
            name: loss
            for name, loss in self.losses.items()
            if not abs(loss - expected) <= TOLERANCE * abs(expected)
        }


@contextlib.contextmanager
def progress(
    title: str, rounds: int | None, stderr: TextIO | None = None
) -> Iterator[Callable[[], None]]:
    """Shows a bar, or a line where it can't; yields a function for a round."""
    console = Console(file=stderr or sys.stderr, highlight=False)
    if not console.is_terminal:
        console.print(f"Measuring {title}", markup=False)
    with progress_bar(console, TimeElapsedColumn()) as bar:
        task = bar.add_task(f"Measuring {title}", total=rounds)
        yield lambda: bar.advance(task)


def time_arms(
    arms: Mapping[str, Arm],
    steps: int,
    rounds: int,
    on_round: Callable[[], None],
    on_block: Callable[[], object] = lambda: None,
    with_start: Sequence[str] = (),
) -> dict[str, list[float]]:
    """Returns the seconds that a step of each arm takes in each round.

    Of arms `with_start`, the time that the first few steps take is left out.
    """
    times: dict[str, list[float]] = {name: [] for name in arms}

    def taken_by(name: str, steps: int) -> float:
        on_block()
        start = time.perf_counter()
        arms[name](steps)
        return time.perf_counter() - start

    order = list(arms)
    for _ in range(rounds):
        for name in order:
            left_out, more = 0.0, 0
            if name in with_start:
                left_out, more = taken_by(name, FEW), FEW
            taken = taken_by(name, steps + more) - left_out
            times[name].append(taken / steps)
        order.reverse()
        on_round()
    return times


def steps_that_take(arm: Arm, seconds: float) -> int:
    """Returns how many steps take `seconds`, without the cost of a call."""
    # On TensorFlow, a call of `fit` costs as much as many steps. So the time
    # that twice as many steps add is what counts.

    def taken_by(steps: int) -> float:
        start = time.perf_counter()
        arm(steps)
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


def calls_a_step(
    arm: Arm, wanted: Iterable[CodeType] = (), steps: int = FEW
) -> tuple[float, float]:
    """Returns the Python calls in a step of a warm arm, in this thread.

    The second number is that of the calls of functions with a wanted code.
    """
    codes = {*wanted}

    def calls(steps: int) -> Counter[bool]:
        seen: Counter[bool] = Counter()

        def count(frame: FrameType, event: str, argument: object) -> None:
            if event == "call":
                seen[frame.f_code in codes] += 1

        # Collecting garbage calls functions of some libraries.
        gc.collect()
        gc.disable()
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            arm(steps)
        finally:
            sys.setprofile(before)
            gc.enable()
        return seen

    # The difference has no calls that a block makes once.
    few, many = calls(steps), calls(2 * steps)
    all_calls = many.total() - few.total()
    return all_calls / steps, (many[True] - few[True]) / steps

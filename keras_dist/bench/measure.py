"""The measuring loop, whose arms take turns, and counts of a step."""

import contextlib
import gc
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType
from types import FrameType
from typing import Any
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike
from rich.console import Console
from rich.progress import TimeElapsedColumn

from keras_dist.bench.loops import Loop
from keras_dist.bench.loops import Setting
from keras_dist.errors import KerasDistError
from keras_dist.planning.tables import progress_bar

# Steps that warm an arm up, and steps in which calls are counted.
COUNTED_STEPS = 20
FEW = 8
# Steps in a call of `scan_steps`.
SCANNED_STEPS = 10

# The largest relative difference of early losses between equivalent arms. It is
# not only rounding: PyTorch's Adam adds its epsilon elsewhere than Keras'.
TOLERANCE = 1e-2

# The ratio of an arm to its copy outside of which the machine was too busy, and
# the largest distance of that ratio's quartiles.
NOISE = (0.97, 1.03)
SPREAD = 0.2
# Quartiles of fewer rounds say nothing.
LEAST_ROUNDS = 5

# The copy of the base, and all arms that `pairs_of` knows by name.
AGAIN = "again"
_KNOWN = {"native", "ours", AGAIN, "scan", "ragged", "reduced"}

T = TypeVar("T")

# A job is given a function to call after each of its rounds.
Job = Callable[[Callable[[], None]], T]

_FOLDER = "/proc/self/fd"
# The offset of `tcpi_bytes_sent`, an unsigned 64 bit integer, in Linux'
# `struct tcp_info`, and the bytes to read of that.
_OFFSET, _SIZE = 200, 256


class LossMismatchError(KerasDistError, RuntimeError):
    """Raised when two arms compute different things, so times mean nothing."""


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
    """The ratio of two arms, as a row of the summary."""

    name: str
    ratio: Ratio
    verdict: str


@dataclass(frozen=True)
class Measurement:
    """All numbers of one setting."""

    setting: Setting
    steps: int  # of a block
    times: Mapping[str, list[float]]  # of a step, for each arm and round
    losses: Mapping[str, float]  # after the first steps
    counts: Mapping[str, Mapping[str, float | None]]  # what, then which arm
    pairs: Sequence[tuple[str, str]]
    base: str = "native"  # the arm that `AGAIN` is a copy of

    @property
    def noise(self) -> Ratio:
        """The ratio of the base's copy to the base."""
        return Ratio.of(self.times[AGAIN], self.times[self.base])

    def comparisons(self) -> list[Comparison]:
        """Returns the ratio of each pair, with a verdict."""
        rows = []
        for arm, other in self.pairs:
            if other == self.base:
                # Ours runs between the base and its copy, so their mean is free
                # of a steady drift.
                both = [self.times[other], self.times[AGAIN]]
                ratio = Ratio.of(self.times[arm], np.mean(both, axis=0))
            else:
                ratio = Ratio.of(self.times[arm], self.times[other])
            name = f"{arm}/{other}"
            word = verdict(ratio, self.noise, len(self.times[self.base]))
            rows.append(Comparison(name, ratio, word))
        return rows


def pairs_of(arms: Iterable[str]) -> list[tuple[str, str]]:
    """Returns the pairs of arms to compare with a native loop, ours first."""
    arms = list(arms)
    pairs = [
        ("ours", "native"),
        ("reduced", "native"),
        ("ragged", "ours"),
        ("scan", "ours"),
    ]
    for arm in arms:
        if arm not in _KNOWN:
            pairs += [(arm, "native"), ("ours", arm)]
    return [pair for pair in pairs if pair[0] in arms]


def in_turn(jobs: Mapping[str, Job[T]], rounds: int | None = None) -> list[T]:
    """Does jobs one after another, shows progress, and returns the results."""
    console = Console(stderr=True, highlight=False)
    done = []
    with progress_bar(console, TimeElapsedColumn()) as progress:
        for name, job in jobs.items():
            if not console.is_terminal:
                console.print(f"Measuring {name}", markup=False)
            task = progress.add_task(f"Measuring {name}", total=rounds)
            done.append(job(lambda task=task: progress.advance(task)))  # type: ignore[misc]
            progress.remove_task(task)
    return done


def check_losses(
    losses: Mapping[str, float],
    others: Collection[str] = ("ragged",),
    base: str = "native",
) -> None:
    """Refuses to compare arms whose losses differ from the arm `base`."""
    for name, loss in far_losses(losses, base).items():
        if name not in others:
            raise LossMismatchError(
                f"The arm '{name}' computes different numbers from the arm "
                f"'{base}'. Received: a loss of {loss} after the first steps. "
                f"Expected: {losses[base]}, up to {TOLERANCE:.0e} of it. This "
                "is a bug; please report it with the versions you use."
            )


def far_losses(losses: Mapping[str, float], base: str) -> dict[str, float]:
    """Returns the losses that differ from that of the arm `base`."""
    expected = losses[base]
    # A comparison with NaN is false, so a loss that blew up is far.
    return {
        name: loss
        for name, loss in losses.items()
        if not abs(loss - expected) <= TOLERANCE * abs(expected)
    }


def time_arms(
    arms: Mapping[str, Loop],
    steps: int,
    rounds: int,
    on_round: Callable[[], None],
    on_block: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Returns the seconds that a step of each arm takes in each round."""
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
    """Returns how many steps take `seconds`: a multiple of `SCANNED_STEPS`."""
    seen = []
    for _ in range(3):
        start = time.perf_counter()
        arm.run(COUNTED_STEPS)
        seen.append((time.perf_counter() - start) / COUNTED_STEPS)
    one = sorted(seen)[1]
    return SCANNED_STEPS * max(1, round(seconds / one / SCANNED_STEPS))


def steps_that_take(arm: Loop, seconds: float) -> int:
    """Returns how many steps take `seconds`, without the cost of a call."""
    # On TensorFlow, a call of `fit` costs as much as many steps. So the time
    # that twice as many steps add is what counts.

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


class Profile:
    """A context that counts calls."""

    def __init__(self, wanted: Collection[CodeType] = ()) -> None:
        self._wanted = wanted
        # Calls in the thread that opened the context.
        self.calls = 0
        # Calls of `wanted` in that thread, and in those that started meanwhile.
        self.of_wanted = 0

    def __enter__(self) -> "Profile":
        self._before = sys.getprofile(), threading.getprofile()
        threading.setprofile(self._elsewhere)
        sys.setprofile(self._here)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._before[0])
        threading.setprofile(self._before[1])

    def _here(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.calls += 1
            self.of_wanted += frame.f_code in self._wanted

    def _elsewhere(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.of_wanted += frame.f_code in self._wanted


def calls_a_step(loop: Loop, steps: int) -> float:
    """Returns the Python calls in a step of a warm loop, in this thread."""

    def calls(steps: int) -> int:
        # Collecting garbage calls functions of some libraries.
        gc.collect()
        gc.disable()
        try:
            with Profile() as profile:
                loop.run(steps)
        finally:
            gc.enable()
        return profile.calls

    number = a_step(calls, steps)
    assert number is not None
    return number


def a_step(in_steps: Callable[[int], int | None], steps: int) -> float | None:
    """Returns the count that one step adds, without a block's fixed count."""
    few, many = in_steps(steps), in_steps(2 * steps)
    if few is None or many is None:
        return None
    # The difference is negative if a socket was closed meanwhile: its bytes are
    # not counted any more.
    return max(0.0, (many - few) / steps)


def bytes_sent() -> int | None:
    """Returns the bytes sent by all open TCP sockets, if the system tells."""
    if not sys.platform.startswith("linux"):
        return None
    total = 0
    for name in os.listdir(_FOLDER):
        with contextlib.suppress(OSError):  # closed meanwhile, or not TCP
            if not os.readlink(f"{_FOLDER}/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                info = one.getsockopt(
                    socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE
                )
            # The structure was shorter before Linux 4.19.
            if len(info) < _OFFSET + 8:
                return None
            total += int(struct.unpack_from("Q", info, _OFFSET)[0])
    return total

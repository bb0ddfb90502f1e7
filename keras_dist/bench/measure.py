"""The measurement of one setting, whose arms take turns."""

import time
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping

from keras_dist.bench.benchmarks import Benchmarks
from keras_dist.bench.loops import Loop
from keras_dist.bench.loops import Setting
from keras_dist.bench.measurement import Measurement
from keras_dist.bench.measurement import pairs_of
from keras_dist.bench.portable import SCANNED_STEPS
from keras_dist.bench.portable import PortableLoop
from keras_dist.bench.portable import ReducedLoop
from keras_dist.bench.portable import ScannedLoop
from keras_dist.bench.profile import calls_a_step
from keras_dist.errors import KerasDistError

COUNTED_STEPS = 20

# The largest relative difference of early losses between equivalent arms. It is
# not only rounding: PyTorch's Adam adds its epsilon elsewhere than Keras'.
_TOLERANCE = 1e-2


class LossMismatchError(KerasDistError, RuntimeError):
    """Raised when two arms compute different things, so times mean nothing."""


def build_arms(benchmarks: Benchmarks, setting: Setting) -> dict[str, Loop]:
    """Returns the loops to measure, by name.

    Neighbors are measured one after the other.
    """
    arms: dict[str, Loop] = {
        "native": benchmarks.native_loop(setting),
        "ours": PortableLoop(setting),
        "again": benchmarks.native_loop(setting),
        "scan": ScannedLoop(setting),
    }
    if setting.num_replicas > 1:
        arms["ragged"] = PortableLoop(setting, setting.size.rows - 1)
        arms["reduced"] = ReducedLoop(setting)
    return arms | benchmarks.other_loops(setting)


def measure(
    benchmarks: Benchmarks,
    setting: Setting,
    rounds: int,
    seconds: float,
    on_round: Callable[[], None],
) -> Measurement:
    """Measures all arms in blocks that alternate.

    A block of the native loop takes about `seconds`, and each arm has `rounds`
    blocks. `on_round` is called after each round.

    Raises:
        LossMismatchError: If the arms' losses differ.
    """
    arms = build_arms(benchmarks, setting)
    losses = {name: arm.run(COUNTED_STEPS) for name, arm in arms.items()}
    check_losses(losses)
    ours = arms["ours"]
    assert isinstance(ours, PortableLoop)
    counts = count(ours, arms["native"])
    steps = steps_in(arms["native"], seconds)
    times = time_arms(arms, steps, rounds, on_round)
    return Measurement(setting, steps, times, losses, counts, pairs_of(arms))


def check_losses(
    losses: Mapping[str, float],
    others: Collection[str] = ("ragged",),
    base: str = "native",
) -> None:
    """Refuses to compare arms whose losses differ from the arm `base`.

    `losses` are those after equally many steps. `others` are arms that have
    other rows and may differ.

    Raises:
        LossMismatchError: If the loss of an arm is not that of the base.
    """
    expected = losses[base]
    for name, loss in losses.items():
        # A comparison with NaN is false, so a loss that blew up is refused.
        if name not in others and not (
            abs(loss - expected) <= _TOLERANCE * abs(expected)
        ):
            raise LossMismatchError(
                f"The arm '{name}' computes something else than the arm "
                f"'{base}'. Received: a loss of {loss} after the first steps. "
                f"Expected: {expected}, up to {_TOLERANCE:.0e} of it. This "
                "is a bug; please report it with the versions you use."
            )


def time_arms(
    arms: Mapping[str, Loop],
    steps: int,
    rounds: int,
    on_round: Callable[[], None],
    on_block: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Returns the seconds that a step of each arm takes in each round.

    A block has `steps` steps. `on_round` is called after each round, `on_block`
    before each block.
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
    """Returns how many steps take `seconds`: a multiple of `SCANNED_STEPS`."""
    seen = []
    for _ in range(3):
        start = time.perf_counter()
        arm.run(COUNTED_STEPS)
        seen.append((time.perf_counter() - start) / COUNTED_STEPS)
    one = sorted(seen)[1]
    return SCANNED_STEPS * max(1, round(seconds / one / SCANNED_STEPS))


def count(
    ours: PortableLoop, native: Loop
) -> dict[str, dict[str, float | None]]:
    """Counts Python calls and traces of warm loops."""
    before = ours.traces
    calls = calls_a_step(ours, COUNTED_STEPS)
    traces = ours.traces - before
    num_runs = 3 * COUNTED_STEPS * ours.strategy.num_replicas_in_sync
    native_calls = calls_a_step(native, COUNTED_STEPS)
    return {
        "calls": {"ours": calls, "native": native_calls},
        # Python runs each eager step: there are no traces to count.
        "traced_again": {"ours": None if traces == num_runs else traces},
    }

"""Ratios of paired times, and their verdicts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# The ratio of an arm to its copy outside of which the machine was too busy, and
# the largest distance of that ratio's quartiles.
NOISE = (0.97, 1.03)
SPREAD = 0.2
# Quartiles of fewer rounds say nothing.
LEAST_ROUNDS = 5


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios, with their quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(
        cls,
        times: Sequence[float] | NDArray[np.float64],
        base: Sequence[float] | NDArray[np.float64],
    ) -> "Ratio":
        """Returns the ratio of times to those of `base` in the same rounds."""
        paired = np.asarray(times) / np.asarray(base)
        low, median, high = np.percentile(paired, [25, 50, 75])
        return cls(float(median), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def verdict(ratio: Ratio, noise: Ratio, rounds: int) -> str:
    """Returns the meaning of a ratio in a word.

    It is "few rounds" for fewer than `LEAST_ROUNDS`; "noise" if the ratio of an
    arm to its copy (`noise`) shows that the machine was too busy; "level" if
    the difference is not larger than what passes for noise, or the quartiles
    disagree on its sign; else "faster" or "slower".
    """
    if rounds < LEAST_ROUNDS:
        return "few rounds"
    least, most = NOISE
    # If rounds don't agree, a median within these limits is luck.
    if not (least <= noise.median <= most) or noise.high - noise.low > SPREAD:
        return "noise"
    if least <= ratio.median <= most or ratio.low <= 1.0 <= ratio.high:
        return "level"
    return "faster" if ratio.median < 1.0 else "slower"

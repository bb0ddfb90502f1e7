"""Ratios of paired times, and what may be said about them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# The ratio of an arm to its copy, beyond which the machine was too busy, and
# the distance of its quartiles.
NOISE = (0.97, 1.03)
SPREAD = 0.2
# Quartiles of fewer say nothing.
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
        """Compares times measured in the same rounds.

        Args:
            times: Sequence of the numerators, one a round.
            base: Sequence of the denominators.
        """
        paired = np.asarray(times) / np.asarray(base)
        low, median, high = np.percentile(paired, [25, 50, 75])
        return cls(float(median), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def verdict(ratio: Ratio, noise: Ratio, rounds: int) -> str:
    """What a ratio means, in a word.

    Args:
        ratio: `Ratio` to judge.
        noise: `Ratio` of an arm to its copy in the same run.
        rounds: Integer, how many times both are of.

    Returns:
        String: "few rounds" if they are less than `LEAST_ROUNDS`; "noise" if
        the run can't tell; "level" if the difference is not larger than what
        passes for noise, or the quartiles disagree on its sign; else "faster"
        or "slower".
    """
    if rounds < LEAST_ROUNDS:
        return "few rounds"
    least, most = NOISE
    # Without rounds that agree, a median between them is luck.
    if not (least <= noise.median <= most) or noise.high - noise.low > SPREAD:
        return "noise"
    if least <= ratio.median <= most or ratio.low <= 1.0 <= ratio.high:
        return "level"
    return "faster" if ratio.median < 1.0 else "slower"

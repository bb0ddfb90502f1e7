"""What was measured of one setting, and the ratios that it gives."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keras_dist.bench.loops import Setting
from keras_dist.bench.ratios import Ratio
from keras_dist.bench.ratios import verdict

# The copy of the loop to compare with, and what else has a name of its own.
AGAIN = "again"
_KNOWN = {"native", "ours", AGAIN, "scan", "ragged", "reduced"}


@dataclass(frozen=True)
class Comparison:
    """A row of the summary."""

    name: str
    ratio: Ratio
    verdict: str


@dataclass(frozen=True)
class Measurement:
    """All there is about one setting.

    Args:
        setting: `Setting`.
        steps: Integer, steps in a block.
        times: Dict from arm to the seconds a step took, one a round.
        losses: Dict from arm to the loss after the first steps.
        counts: Dict from what was counted to a dict from arm to its number;
            `None` is a number that can't be had.
        pairs: Sequence of the pairs of arms to compare.
        base: String, the arm that `"again"` is a copy of.
    """

    setting: Setting
    steps: int
    times: Mapping[str, list[float]]
    losses: Mapping[str, float]
    counts: Mapping[str, Mapping[str, float | None]]
    pairs: Sequence[tuple[str, str]]
    base: str = "native"

    @property
    def noise(self) -> Ratio:
        """The base's copy, against the base."""
        return Ratio.of(self.times[AGAIN], self.times[self.base])

    @property
    def rounds(self) -> int:
        """How many blocks of each arm were measured."""
        return len(self.times[self.base])

    def comparisons(self) -> list[Comparison]:
        """The ratios of all pairs."""
        rows = []
        for arm, other in self.pairs:
            if other == self.base:
                # Ours runs between the two; their mean is free of a steady
                # drift.
                both = [self.times[other], self.times[AGAIN]]
                ratio = Ratio.of(self.times[arm], np.mean(both, axis=0))
            else:
                ratio = Ratio.of(self.times[arm], self.times[other])
            name = f"{arm}/{other}"
            word = verdict(ratio, self.noise, self.rounds)
            rows.append(Comparison(name, ratio, word))
        return rows


def pairs_of(arms: Iterable[str]) -> list[tuple[str, str]]:
    """What to compare where there is a native loop: ours with it first."""
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

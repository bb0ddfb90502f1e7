"""The measurement of one setting, and its ratios."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keras_dist.bench.loops import Setting
from keras_dist.bench.ratios import Ratio
from keras_dist.bench.ratios import verdict

# The copy of the base, and all arms that `pairs_of` knows by name.
AGAIN = "again"
_KNOWN = {"native", "ours", AGAIN, "scan", "ragged", "reduced"}


@dataclass(frozen=True)
class Comparison:
    """The ratio of two arms, as a row of the summary."""

    name: str
    ratio: Ratio
    verdict: str


@dataclass(frozen=True)
class Measurement:
    """All numbers of one setting.

    Args:
        setting: The model and the devices.
        steps: Steps in a block.
        times: Seconds of a step of each arm, one for each round.
        losses: Loss of each arm after the first steps.
        counts: By what was counted, the number of each arm; `None` if it is not
            known.
        pairs: Pairs of arms to compare.
        base: The arm that `"again"` is a copy of.
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
        """The ratio of the base's copy to the base."""
        return Ratio.of(self.times[AGAIN], self.times[self.base])

    @property
    def rounds(self) -> int:
        """The number of blocks of each arm."""
        return len(self.times[self.base])

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
            word = verdict(ratio, self.noise, self.rounds)
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

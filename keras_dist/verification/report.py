"""The report that `strategy.verify` returns."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import fields
from typing import Any

import numpy as np

from keras_dist.errors import NumbersDifferError
from keras_dist.errors import see_section
from keras_dist.planning import tables

SECTION = "The numbers differ"
_MOST_LAYERS = 5


@dataclass(frozen=True)
class Difference:
    """The comparison of one value on one device and under the strategy.

    Args:
        kind: String, one of `"prediction"`, `"loss"`, `"metric"`, `"gradient"`,
            `"state"` (a variable that is not trained), `"weight"` and `"slot"`
            (of an optimizer).
        name: String, the name of the log or the path of the variable.
        phase: String, `"predict"`, `"evaluate"`, `"gradients"`, `"training"` or
            `"fit"` (all batches in one `fit`).
        step: Integer from 0, the step of `phase`.
        rows: Integer, rows of the batch.
        one_device: Float, the value on one device; of an array, the entry that
            differs most.
        strategy: Float, the same entry under the strategy.
        relative: Float, the difference, relative to the largest entry; for
            weights, slots and states, relative to the largest change by
            training.
        allowed: Float, the largest `relative` that counts as rounding.
        only: String, `"one_device"` or `"strategy"` if only there the value
            exists, or empty. The other one is NaN then.
    """

    kind: str
    name: str
    phase: str
    step: int
    rows: int
    one_device: float
    strategy: float
    relative: float
    allowed: float
    only: str = ""

    @property
    def differs(self) -> bool:
        """True if the difference is larger than rounding."""
        return not self.relative <= self.allowed

    def __str__(self) -> str:
        where = (
            f"{self.kind} '{self.name}' in step {self.step} of {self.phase}, "
            f"a batch of {self.rows} rows: "
        )
        if np.isnan(self.one_device) and np.isnan(self.strategy):
            return f"{where}replicas differ"
        if self.only == "strategy":
            return (
                f"{where}{self.strategy:.6g} under the strategy, and no such "
                f"{self.kind} on one device"
            )
        if self.only == "one_device":
            return (
                f"{where}{self.one_device:.6g} on one device, and no such "
                f"{self.kind} under the strategy"
            )
        return (
            f"{where}{self.strategy:.6g}, on one device "
            f"{self.one_device:.6g}; relative difference {self.relative:.1e}, "
            f"allowed {self.allowed:.1e}"
        )


@dataclass(frozen=True)
class Cause:
    """The likely cause of a difference.

    Args:
        name: String: `"a sum over rows"`, `"an override of Loss.__call__"`,
            `"a state counted in shares"`, `"rows coupled in a layer"`,
            `"sparse gradients"`, `"the optimizer"`, `"a metric"`,
            `"a value of one side"` or `"randomness"`.
        text: String, the observation, and what to write instead.
    """

    name: str
    text: str


@dataclass(frozen=True, repr=False)
class Report(tables.Shown):
    """The result of `strategy.verify`; `print` shows it.

    Args:
        model: String, the model's name.
        strategy: String, a description of the strategy.
        differences: Tuple of `Difference`s, one for each value that was
            compared, in the order of a step. Values that agree are included.
        cause: The likely `Cause`, or `None`.
        batches: Tuple of integers, rows of each batch.
        notes: Tuple of sentences.
    """

    model: str
    strategy: str
    differences: tuple[Difference, ...]
    cause: Cause | None
    batches: tuple[int, ...]
    notes: tuple[str, ...]

    @property
    def first(self) -> Difference | None:
        """The first `Difference` that is larger than rounding, or `None`."""
        different = [
            difference for difference in self.differences if difference.differs
        ]
        return min(
            (d for d in different if d.phase == different[0].phase),
            key=lambda difference: difference.step,
            default=None,
        )

    @property
    def by_layer(self) -> tuple[tuple[str, float], ...]:
        """The gradients that differ first, as pairs, largest first.

        A pair has the path of a variable, and the relative difference of its
        gradient.
        """
        wrong = [
            difference
            for difference in self.differences
            if difference.kind == "gradient" and difference.differs
        ]
        first = min((difference.step for difference in wrong), default=0)
        pairs = [(d.name, d.relative) for d in wrong if d.step == first]
        return tuple(sorted(pairs, key=lambda pair: -pair[1]))

    @property
    def same(self) -> bool:
        """True if the strategy gives the numbers of one device."""
        return self.first is None

    @property
    def not_finite(self) -> Difference | None:
        """The first value that is NaN or infinite, which can't be compared."""
        affected = (d for d in self.differences if not np.isfinite(d.strategy))
        return next(affected, None)

    @property
    def section(self) -> str:
        """The section to read of the page about errors; empty if `same`."""
        return "" if self.same else SECTION

    def raise_if_different(self) -> None:
        """Raises an error if numbers differ.

        Raises:
            NumbersDifferError: If they do. Its message is `verdict`.
        """
        if not self.same:
            raise NumbersDifferError(self.verdict)

    @property
    def verdict(self) -> str:
        """The result in a few sentences."""
        if self.first is None:
            worst = max((d.relative for d in self.differences), default=0.0)
            return (
                f"same: {len(self.differences)} things compared, the largest "
                f"relative difference is {worst:.1e}."
            )
        cause = ""
        if self.cause is not None:
            cause = f" Likely cause: {self.cause.name}. {self.cause.text}"
        return f"The numbers differ. First: {self.first}.{cause}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the report in types that JSON has."""
        return {
            "same": self.same,
            "section": self.section,
            "first": self.first and asdict(self.first),
            "by_layer": self.by_layer,
            **asdict(self),
            "differences": [
                asdict(difference) | {"differs": difference.differs}
                for difference in self.differences
            ],
        }

    def to_json(self) -> str:
        """Returns `to_dict` as a string of JSON."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Report":
        """Returns the report that `to_dict` was called on."""
        names = [field.name for field in fields(Difference)]
        return cls(
            data["model"],
            data["strategy"],
            tuple(
                Difference(**{name: difference[name] for name in names})
                for difference in data["differences"]
            ),
            data["cause"] and Cause(**data["cause"]),
            tuple(data["batches"]),
            tuple(data["notes"]),
        )

    def __repr__(self) -> str:
        verdict = "same" if self.first is None else f"differs: {self.first}"
        return f"<Report of '{self.model}' on {self.strategy}: {verdict}>"

    def __rich__(self) -> tables.TableReport:
        made = tables.table(
            f"'{self.model}' on {self.strategy}, and on one device",
            ("Phase", tables.WORD),
            ("What", tables.WORDS),
            ("Compared", tables.NUMBER),
            ("Largest", tables.NUMBER),
            ("Of", tables.WORDS),
            ("Found", tables.WORD),
            rows=_rows(self),
        )
        sizes = ", ".join(map(str, self.batches))
        notes = [f"Batches of {sizes} rows.", *self.notes, self.verdict]
        if self.by_layer:
            notes += ["Gradients that differ most, relative to the largest:"]
            notes += [
                f"  {path}: {relative:.1e}"
                for path, relative in self.by_layer[:_MOST_LAYERS]
            ]
        if not self.same:
            notes.append(see_section(self.section))
        return tables.TableReport("", [made], notes)


def _rows(report: Report) -> Iterator[tuple[str, ...]]:
    groups: dict[tuple[str, str], list[Difference]] = {}
    for difference in report.differences:
        groups.setdefault((difference.phase, difference.kind), []).append(
            difference
        )
    for (phase, kind), differences in groups.items():
        different = [
            difference for difference in differences if difference.differs
        ]
        worst = max(
            different or differences, key=lambda difference: difference.relative
        )
        yield (
            phase,
            kind,
            str(len(differences)),
            f"{worst.relative:.1e}",
            worst.name,
            "differs" if different else "same",
        )

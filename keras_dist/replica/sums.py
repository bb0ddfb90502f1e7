"""Tells sums over rows from means, by the values of both halves of the rows."""

import enum
import json
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import keras
import numpy as np


class Kind(enum.Enum):
    """The relation of a value of all rows to the values of both halves."""

    SUM = "their sum"
    MEAN = "their mean"
    CONSTANT = "the same"
    COUPLED = "neither their sum nor their mean"
    UNKNOWN = "not to be told"


def clearer(one: Kind, other: Kind) -> Kind:
    """Returns the kind that says more; `COUPLED` if clear kinds differ."""
    vague = (Kind.UNKNOWN, Kind.CONSTANT)
    if one in vague:
        return one if other is Kind.UNKNOWN else other
    if other in vague or one is other:
        return one
    return Kind.COUPLED


def kind_of(
    whole: Any,
    first: Any,
    second: Any,
    is_noisy: bool = False,
    tolerance: float = 2e-3,
) -> Kind:
    """Returns the kind of a value of all rows, given those of both halves."""
    arrays = [np.asarray(x, "float64") for x in (whole, first, second)]
    if any(not np.all(np.isfinite(x)) for x in arrays):
        return Kind.UNKNOWN
    whole, first, second = arrays
    if not whole.shape == first.shape == second.shape:
        return Kind.COUPLED
    mean = (first + second) / 2
    size = float(np.max(np.abs([whole, first, second]), initial=0.0))
    if not size:
        return Kind.UNKNOWN
    if is_noisy:
        return _nearest(whole, mean)

    def near(one: Any, other: Any) -> bool:
        return bool(np.max(np.abs(one - other)) <= tolerance * size)

    if near(first, second) and near(whole, first):
        return Kind.CONSTANT
    is_mean, is_sum = near(whole, mean), near(whole, 2 * mean)
    if is_mean and is_sum:
        return Kind.UNKNOWN
    if is_mean:
        return Kind.MEAN
    return Kind.SUM if is_sum else Kind.COUPLED


def _nearest(whole: Any, mean: Any) -> Kind:
    square = float(np.sum(mean * mean))
    ratio = float(np.sum(whole * mean)) / square if square else 0.0
    if 0.7 < ratio < 1.4:
        return Kind.MEAN
    return Kind.SUM if 1.4 <= ratio < 2.8 else Kind.UNKNOWN


@dataclass
class Found:
    """The kinds of losses and variables that a layer's call showed."""

    terms: list[Kind] = field(default_factory=list)
    # By the id of each assigned variable.
    variables: dict[int, tuple[Any, Kind]] = field(default_factory=dict)
    error: Exception | None = None  # a failed call's
    is_agreed: bool = False  # has what other workers found too

    @property
    def is_clear(self) -> bool:
        """`True` if something was found and the kind of each part is known."""
        kinds = [*self.terms, *(kind for _, kind in self.variables.values())]
        vague = (Kind.UNKNOWN, Kind.CONSTANT)
        return bool(kinds) and not any(kind in vague for kind in kinds)

    def add(self, more: "Found") -> None:
        """Adds what another look at the layer's call has shown."""
        if not self.terms:
            self.terms = more.terms
        elif len(self.terms) == len(more.terms):
            pairs = zip(self.terms, more.terms, strict=True)
            self.terms = [clearer(*pair) for pair in pairs]
        for key, (variable, kind) in more.variables.items():
            _, before = self.variables.get(key, (variable, Kind.UNKNOWN))
            self.variables[key] = variable, clearer(before, kind)

    def agree(
        self,
        variables: Sequence[keras.Variable],
        everyones: Callable[[str], list[str]],
    ) -> None:
        """Adds what all workers have found, alike on each."""
        outside = [v for v, _ in self.variables.values()]
        named = {v.path: v for v in outside} | dict(enumerate(variables))
        places = {id(v): place for place, v in named.items()}
        own = {
            "terms": [kind.name for kind in self.terms],
            "variables": [
                (places[key], kind.name)
                for key, (_, kind) in self.variables.items()
                if key in places
            ],
        }
        self.terms, self.variables = [], {}
        for text in everyones(json.dumps(own)):
            told = json.loads(text)
            self.add(
                Found(
                    [Kind[name] for name in told["terms"]],
                    {
                        id(named[place]): (named[place], Kind[name])
                        for place, name in told["variables"]
                        if place in named
                    },
                )
            )
        self.is_agreed = True

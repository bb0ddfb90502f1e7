"""The two parts of a step's program: up to the gradients, and the updates."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from keras_dist_jax.jax_internals import needed_for
from keras_dist_jax.jax_internals import opened
from keras_dist_jax.jax_internals import with_parts
from keras_dist_jax.jaxprs import variables
from keras_dist_jax.optimizer_calls import is_update


@dataclasses.dataclass(frozen=True)
class Update:
    """A part of a step's program after the gradients."""

    program: Any
    # Positions of its arguments: in the state, then in what the first part
    # hands over.
    state: tuple[int, ...]
    crossing: tuple[int, ...]
    # Positions among the step's outputs and new state.
    results: tuple[int, ...]
    # Equal for equal updates of one plan; `None` if unknown.
    key: Any


class Partition:
    """A program in two parts; the second depends on updates of optimizers.

    The second part can run elsewhere if all its other inputs are gradients, or
    single numbers. Otherwise the first update moves to the first part, as in a
    step whose second loss uses weights that the first update has changed. Then
    the second update moves, and so on, until the rest can follow.
    """

    def __init__(self, closed: Any, size: int) -> None:
        jaxpr = opened(closed)
        self._closed, self._jaxpr, self._size = closed, jaxpr, size
        self._state = list(jaxpr.invars[:size])
        self._batch = list(jaxpr.invars[size:])
        self._constants = set(jaxpr.constvars)
        self.num_outputs = len(jaxpr.outvars) - size
        updates = [eqn for eqn in jaxpr.eqns if is_update(eqn)]
        self._late: set[Any] = set()
        for start in range(len(updates) + 1):
            if self._can_follow(updates[start:]):
                break
        self._cut()

    def _can_follow(self, updates: Sequence[Any]) -> bool:
        """Finds equations after updates; tells if they can run elsewhere."""
        chosen = set(map(id, updates))
        state = set(self._state)
        late: set[Any] = set()
        equations = []
        for eqn in self._jaxpr.eqns:
            taken = variables(eqn.invars)
            is_chosen = id(eqn) in chosen
            if is_chosen or not late.isdisjoint(taken):
                late.update(eqn.outvars)
                equations.append(eqn)
                others = set(taken) - late - state - self._constants
                if not is_chosen and any(v.aval.size > 1 for v in others):
                    return False
        self._late, self._equations = late, equations
        return True

    def _cut(self) -> None:
        jaxpr, late = self._jaxpr, self._late
        crossing: dict[Any, None] = {}
        here = late | set(self._state) | self._constants
        for eqn in self._equations:
            taken = variables(eqn.invars)
            crossing.update(dict.fromkeys(v for v in taken if v not in here))
        self.gives, self._later = [], []
        for place, v in enumerate(jaxpr.outvars):
            position = place - self.num_outputs
            if isinstance(v, Literal):
                self.gives.append(place)
            elif v in late:
                self._later.append(place)
            elif position < 0 or v is not self._state[position]:
                self.gives.append(place)
        ids = set(map(id, self._equations))
        equations = [eqn for eqn in jaxpr.eqns if id(eqn) not in ids]
        results = [jaxpr.outvars[place] for place in self.gives]
        used = {v for eqn in equations for v in variables(eqn.invars)}
        used.update(variables(results))
        self.reads = [i for i, v in enumerate(self._state) if v in used]
        self._crossing = list(crossing)
        self.first = self._part(
            [*(self._state[i] for i in self.reads), *self._batch],
            [*results, *crossing],
            equations,
        )

    def _part(self, takes: Any, gives: Any, equations: Any) -> Any:
        effects = frozenset().union(*(eqn.effects for eqn in equations))
        return with_parts(
            self._closed,
            invars=takes,
            outvars=gives,
            eqns=equations,
            effects=effects,
            debug_info=self._jaxpr.debug_info.with_unknown_names(),
        )

    def updates(self, owners: Sequence[Any], primary: Any) -> list[Update]:
        """Splits the part after the gradients by owner, if that is exact.

        It is exact if an owner's part takes only single numbers from another's
        part, such as the count of steps. Else there is one `Update` for all.
        """
        if not self._later:
            return []
        own = [
            primary
            if place < self.num_outputs
            else owners[place - self.num_outputs]
            for place in self._later
        ]
        whole = self._part(
            [*self._state, *self._crossing],
            [self._jaxpr.outvars[place] for place in self._later],
            self._equations,
        )
        parts = [
            (owner, self._update(whole, [each == owner for each in own]))
            for owner in dict.fromkeys(own)
        ]
        is_exact = all(
            owners[position] == owner or self._state[position].aval.size <= 1
            for owner, update in parts
            for position in update.state
        )
        if is_exact:
            return [update for _, update in parts]
        return [self._update(whole, [True] * len(own))]

    def _update(self, whole: Any, chosen: list[bool]) -> Update:
        part, used = needed_for(whole, chosen)
        taken = list(itertools.compress(itertools.count(), used))
        return Update(
            part,
            tuple(p for p in taken if p < self._size),
            tuple(p - self._size for p in taken if p >= self._size),
            tuple(itertools.compress(self._later, chosen)),
            self._key(chosen),
        )

    def _key(self, chosen: list[bool]) -> Any:
        """Returns a key, the same for equal updates of the same values."""
        names: dict[Any, Any] = {v: i for i, v in enumerate(self._state)}
        for place, v in enumerate(self._crossing):
            names[v] = "crossing", place
        key: list[Any] = [tuple(self._later), tuple(chosen)]
        for number, eqn in enumerate(self._equations):
            if not is_update(eqn) or not all(
                v in names for v in variables(eqn.invars)
            ):
                return None
            if len(variables(eqn.invars)) < len(eqn.invars):
                return None
            key.append((eqn.params["name"], *(names[v] for v in eqn.invars)))
            for place, v in enumerate(eqn.outvars):
                names[v] = number, place
        key.extend(names[self._jaxpr.outvars[place]] for place in self._later)
        return tuple(key)

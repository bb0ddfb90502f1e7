"""What is read and written while a compiled function is traced.

At the outside a program has one value of each variable: an array of which
each device has a copy, or, of variables that replicas have values of their
own of, one with an axis for the replicas.
"""

import contextlib
import threading
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import jax
import keras
from jax import numpy as jnp

from keras_dist.errors import StrategyMismatchError
from keras_dist.plugin.compilation import inlining
from keras_dist.replica.scopes import Overlay
from keras_dist.replica.scopes import opened
from keras_dist.replica.variables import SyncOnReadVariable
from keras_dist_jax.gate import Gate
from keras_dist_jax.layout import Layout


def is_split(variable: keras.Variable) -> bool:
    """Whether replicas have values of their own of a variable."""
    return isinstance(variable, SyncOnReadVariable)


class Trace:
    """One trace of a compiled function.

    Args:
        values: Mapping from variables' ids to what they are in the program.
        find: Callable that gives the array of a variable it is not given.
        variables: Mapping from ids to the variables that it is given.

    Attributes:
        values: Dict with the newest values, by the variables' ids.
        variables: Dict of the variables that it has met, by id.
        written: Ids of those that were assigned.
        unknown: Whether there were some that it was not given.
    """

    def __init__(
        self,
        values: Mapping[int, Any],
        find: Any,
        variables: Mapping[int, keras.Variable] | None = None,
    ) -> None:
        self.values = dict(values)
        self.variables = dict(variables or {})
        self.written: dict[int, keras.Variable] = {}
        self.unknown = False
        self._find = find
        self.scope = TraceScope(self)
        # How many branches of control flow it is in.
        self.branches = 0
        # Whether it is only to find the variables.
        self.is_survey = False
        # What it runs on, and who says when, where that is several devices.
        self.layout: Layout | None = None
        self.gate: Gate | None = None
        # The `Region` that is being traced, if it is one.
        self.region: Any = None

    def within(self, values: Mapping[int, Any]) -> "Trace":
        """The trace of a part that has values of its own."""
        inner = Trace(values, self._find, self.variables)
        inner.layout, inner.gate = self.layout, self.gate
        return inner

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Traces what is called in it."""
        before, current.trace = current.trace, self
        try:
            with inlining(), opened(self.scope):
                yield
        finally:
            current.trace = before
            self.scope.release()

    def use(self, layout: Layout, gate: Gate) -> None:
        """Notes that a part of it runs on several devices.

        Raises:
            StrategyMismatchError: If another part does on other ones.
        """
        if self.layout is not None and self.layout is not layout:
            raise StrategyMismatchError(
                "A compiled function ran functions of two strategies. "
                "Expected: one strategy in each compiled function. Compile "
                "two functions, and call them one after the other."
            )
        self.layout, self.gate = layout, gate

    def read(self, variable: keras.Variable) -> Any:
        """What a variable is in the program, or `None` before it has a value.

        With an axis for replicas where they have values of their own.
        """
        self._note(variable)
        key = id(variable)
        if key not in self.values:
            found = self._find(self, variable)
            if found is None:
                return None
            self.unknown = True
            self.values[key] = found
        return self.values[key]

    def write(self, variable: keras.Variable, value: Any) -> None:
        """Replaces what it is, in the same form."""
        self._note(variable)
        self.written[id(variable)] = variable
        self.values[id(variable)] = value

    def _note(self, variable: keras.Variable) -> None:
        self.variables[id(variable)] = variable
        owner = vars(variable).get("distribute_strategy")
        if owner is not None and not owner.plan.is_one_device:
            self.use(owner.executor.layout, owner.executor.gate)


class TraceScope(Overlay):
    """Cross-replica context, or no strategy, while a function is traced."""

    is_base = True

    def __init__(self, trace: Trace) -> None:
        super().__init__(eagerly=eagerly)
        self.below = None
        self._trace = trace

    def get_current_value(self, variable: keras.Variable) -> Any:
        self.was_read.add(id(variable))
        value = self._trace.read(variable)
        if value is None or not is_split(variable):
            return value
        return combined(variable, list(value))

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        if is_split(variable):
            count = variable.distribute_strategy.plan.num_replicas
            value = jnp.stack(
                [share_of(variable, value, i, count) for i in range(count)]
            )
        self._trace.write(variable, value)

    def forget(self, variable: keras.Variable) -> None:
        """Nothing is kept here."""


def combined(variable: Any, values: Iterable[Any]) -> Any:
    """What replicas' values of a variable make in cross-replica context."""
    values = list(values)
    if variable.aggregation not in ("sum", "mean"):
        return values[0]
    total = sum(values[1:], values[0])
    if variable.aggregation == "mean":
        total = total / len(values)
    return total.astype(variable.dtype)


def share_of(variable: Any, value: Any, index: int, count: int) -> Any:
    """What replica `index` has of a value assigned in cross-replica context."""
    if variable.aggregation != "sum":
        return value
    if variable.is_total:
        return value if index == 0 else jnp.zeros_like(value)
    if keras.backend.is_int_dtype(variable.dtype):
        rest = jnp.mod(value, count) if index == 0 else 0
        return jnp.floor_divide(value, count) + rest
    return value / count


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Computes at once, although a function is being traced."""
    with jax.ensure_compile_time_eval():
        yield


class Current(threading.local):
    trace: Trace | None = None


current = Current()


def current_trace() -> Trace | None:
    """What this thread traces, or `None`."""
    return current.trace

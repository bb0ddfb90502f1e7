"""Overlays: values of some variables, on top of the scope that is open."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import keras

from keras_dist.internals import keras_internals
from keras_dist.internals.keras_internals import opened
from keras_dist.replica.state import LayerScope
from keras_dist.replica.state import current_call
from keras_dist.replica.state import current_replica

Eagerly = Callable[[], contextlib.AbstractContextManager[Any]]


class Overlay(LayerScope):
    """Values of some variables over those of the scope that is open."""

    # Whether it stands for the variables themselves.
    is_base = False

    def __init__(
        self,
        values: Iterable[tuple[keras.Variable, Any]] = (),
        eagerly: Eagerly = contextlib.nullcontext,
    ) -> None:
        super().__init__()
        self.below = keras_internals.stateless_scope()
        # The framework computes in this context although it traces.
        self.eagerly = eagerly
        self.was_read: set[int] = set()
        for variable, value in values:
            self.state_mapping[id(variable)] = value

    def get_current_value(self, variable: keras.Variable) -> Any:
        self.was_read.add(id(variable))
        value = self.state_mapping.get(id(variable))
        return value_in(self.below, variable) if value is None else value

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        self.forget(variable)
        with opened(self.below):
            variable.assign(value)

    def forget(self, variable: keras.Variable) -> None:
        """Removes a variable's value, so that it is read from below."""
        self.state_mapping.pop(id(variable), None)


class Recording(Overlay):
    """An overlay that keeps assignments, and makes none."""

    def __init__(
        self,
        values: Iterable[tuple[keras.Variable, Any]] = (),
        eagerly: Eagerly = contextlib.nullcontext,
    ) -> None:
        super().__init__(values, eagerly)
        self._written: dict[int, keras.Variable] = {}

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        self.state_mapping[id(variable)] = value
        self._written[id(variable)] = variable

    def forget(self, variable: keras.Variable) -> None:
        super().forget(variable)
        self._written.pop(id(variable), None)

    @property
    def written(self) -> list[tuple[keras.Variable, Any]]:
        """The variables that were assigned, and their last values."""
        return [
            (variable, self.state_mapping[key])
            for key, variable in self._written.items()
        ]


class Following(Overlay):
    """An overlay that goes on to stand for variables after assignments.

    Args:
        values: Pairs of a variable and its value.
        follow: Callable. Takes one of these variables and what it has after an
            assignment; returns what is read.
        eagerly: As of `Overlay`.
    """

    def __init__(
        self,
        values: Iterable[tuple[keras.Variable, Any]],
        follow: Callable[[keras.Variable, Any], Any],
        eagerly: Eagerly = contextlib.nullcontext,
    ) -> None:
        super().__init__(values, eagerly)
        self._followed = {*self.state_mapping}
        self._follow = follow

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        super().add_update(update)
        variable, _ = update
        if id(variable) in self._followed:
            value = value_in(self.below, variable)
            self.state_mapping[id(variable)] = self._follow(variable, value)


def value_in(
    scope: keras.StatelessScope | None, variable: keras.Variable
) -> Any:
    """Returns a variable's value in a scope, as it is; `None` without one."""
    call = current_call()
    value = None if scope is None else scope.get_current_value(variable)
    if value is None and call is not None and scope is not None:
        # The user's own `StatelessScope` has no value for this variable.
        value = call.scope.get_current_value(variable)
    return keras_internals.value_of(variable) if value is None else value


def base_scope() -> keras.StatelessScope | None:
    """Returns the scope that is open below all overlays, or `None`."""
    scope = keras_internals.stateless_scope()
    while isinstance(scope, Overlay):
        scope = scope.below
    return scope


def values_are_replaced() -> bool:
    """Returns whether this thread reads other values than variables have: of a
    differentiated function, or of a user's own scope."""
    scope = keras_internals.stateless_scope()
    if scope is None or (isinstance(scope, Overlay) and scope.is_base):
        return False
    replica = current_replica()
    return replica is None or scope is not replica.scope


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Suspends all overlays and tracing, to compute values that stay."""
    scope = keras_internals.stateless_scope()
    if not isinstance(scope, Overlay):
        yield
        return
    call = current_call()
    with scope.eagerly(), opened(call.scope if call is not None else None):
        yield


def forget_above(scope: keras.StatelessScope, variable: keras.Variable) -> None:
    """Has all overlays above a scope read a variable from it again."""
    current = keras_internals.stateless_scope()
    while isinstance(current, Overlay) and current is not scope:
        current.forget(variable)
        current = current.below

"""Overlays: values of some variables, on top of the scope that is open.

A function that a framework differentiates or traces reads the variables in
question from an overlay, and all others as it would without one. Layers and
variables that it makes meanwhile are real and outlive the overlay.
"""

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
    """Values of some variables over those of the scope that is open.

    Assignments go to the scope below at once. `values` are pairs of a variable
    and its tensor. `eagerly` returns a context manager in which the framework
    computes although it is tracing; variables are made in it.

    Attributes:
        below: The scope that was open before, or `None`.
        was_read: Ids of the variables that were read here.
        is_base: Whether it stands for the variables themselves.
    """

    is_base = False

    def __init__(
        self,
        values: Iterable[tuple[keras.Variable, Any]] = (),
        eagerly: Eagerly = contextlib.nullcontext,
    ) -> None:
        super().__init__()
        self.below = keras_internals.stateless_scope()
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
    """An overlay that keeps assignments until they are asked for.

    Reads see them. Values of a traced function can leave it as its results
    only: return the values in `written`, and give their results to `replay`.
    """

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


def replay(written: Iterable[tuple[keras.Variable, Any]]) -> None:
    """Assigns the values that a `Recording` kept, once it is closed."""
    for variable, value in written:
        variable.assign(value)


def value_in(
    scope: keras.StatelessScope | None, variable: keras.Variable
) -> Any:
    """Returns a variable's value in a scope, without any casting.

    `None` if the variable has no value yet.
    """
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


def is_recorded() -> bool:
    """Returns whether a `Recording` keeps this thread's assignments."""
    return isinstance(keras_internals.stateless_scope(), Recording)


def values_are_replaced() -> bool:
    """Returns whether this thread reads other values than variables have.

    It does in a function that is differentiated, and under a user's own
    `keras.StatelessScope`. The scopes of a replica and of a compiled function
    stand for the variables themselves.
    """
    scope = keras_internals.stateless_scope()
    if scope is None or (isinstance(scope, Overlay) and scope.is_base):
        return False
    replica = current_replica()
    return replica is None or scope is not replica.scope


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Suspends all overlays and tracing, for what has to outlive them.

    Assignments inside go to the scope below them, or to the variables.
    """
    scope = keras_internals.stateless_scope()
    if not isinstance(scope, Overlay):
        yield
        return
    call = current_call()
    with scope.eagerly(), opened(call.scope if call is not None else None):
        yield


def forget_above(scope: keras.StatelessScope, variable: Any) -> None:
    """Has all overlays above a scope read a variable from it again."""
    current = keras_internals.stateless_scope()
    while isinstance(current, Overlay) and current is not scope:
        current.forget(variable)
        current = current.below

"""Flags of a thread that traces or runs a compiled function."""

import contextlib
import threading
from collections.abc import Iterator

from keras_dist.errors import TraceError


class _Current(threading.local):
    inlines = False
    # The compiled function that is not to make variables any more.
    has_made_all: str | None = None


_current = _Current()


@contextlib.contextmanager
def inlining() -> Iterator[None]:
    """While a compiled function is traced: functions in it are part of it."""
    before, _current.inlines = _current.inlines, True
    try:
        yield
    finally:
        _current.inlines = before


def inlines() -> bool:
    """Whether this thread traces a compiled function."""
    return _current.inlines


@contextlib.contextmanager
def refusing_variables(name: str | None) -> Iterator[None]:
    """While a function runs or is traced again: it made all in its first call.

    Args:
        name: String, the function's name, for the error; `None` to allow
            variables for a while.
    """
    before, _current.has_made_all = _current.has_made_all, name
    try:
        yield
    finally:
        _current.has_made_all = before


def check_creation() -> None:
    """Refuses a variable that a compiled function makes too late.

    Raises:
        TraceError: Under `refusing_variables`.
    """
    if _current.has_made_all is not None:
        raise creation_error(_current.has_made_all)


def creation_error(name: str) -> TraceError:
    """The error of a function that makes variables in a later trace."""
    return TraceError(
        f"The compiled function '{name}' made a `keras.Variable` in a later "
        "call than its first, or each time it is traced. Expected: variables, "
        "layers, metrics and optimizers made outside, once, or kept from the "
        "first call on. Build what is built lazily before it is needed: "
        "`model.build(shape)`, `optimizer.build(model.trainable_variables)`."
    )


def thread_state() -> tuple[bool, str | None]:
    """What a thread that works for this one has to `inherit`."""
    return _current.inlines, _current.has_made_all


def inherit(state: tuple[bool, str | None]) -> None:
    """Gives this thread the `thread_state` of the one it works for."""
    _current.inlines, _current.has_made_all = state

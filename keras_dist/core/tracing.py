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
    """Makes inner compiled functions part of the one that is being traced."""
    before, _current.inlines = _current.inlines, True
    try:
        yield
    finally:
        _current.inlines = before


def inlines() -> bool:
    """Returns true while this thread traces a compiled function."""
    return _current.inlines


@contextlib.contextmanager
def refusing_variables(name: str | None) -> Iterator[None]:
    """Makes `check_creation` raise, for a function after its first call.

    `name` is the function's name, for the error; `None` allows variables
    meanwhile.
    """
    before, _current.has_made_all = _current.has_made_all, name
    try:
        yield
    finally:
        _current.has_made_all = before


def check_creation() -> None:
    """Raises `TraceError` under `refusing_variables`."""
    if _current.has_made_all is not None:
        raise creation_error(_current.has_made_all)


def creation_error(name: str) -> TraceError:
    """Returns the error for a function that creates variables too late."""
    return TraceError(
        f"The compiled function '{name}' made a `keras.Variable` in a later "
        "call than its first, or each time it is traced. Expected: variables, "
        "layers, metrics and optimizers made outside, once, or kept from the "
        "first call on. Build what is built lazily before it is needed: "
        "`model.build(shape)`, `optimizer.build(model.trainable_variables)`."
    )


def thread_state() -> tuple[bool, str | None]:
    """Returns this thread's state for a helper thread to `inherit`."""
    return _current.inlines, _current.has_made_all


def inherit(state: tuple[bool, str | None]) -> None:
    """Sets this thread's state to the `thread_state` of another thread."""
    _current.inlines, _current.has_made_all = state

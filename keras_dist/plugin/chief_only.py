"""Code that only the chief runs: what needs all workers raises there."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

from keras_dist.errors import ReplicaDivergenceError


@dataclasses.dataclass(frozen=True)
class _Code:
    """Code of the chief; with `saves`, all workers save a model together."""

    name: str
    saves: bool


_running: contextvars.ContextVar[_Code | None] = contextvars.ContextVar(
    "keras_dist_chief_only", default=None
)


@contextlib.contextmanager
def chief_only(name: str, saves: bool = False) -> Iterator[None]:
    """Refuses what needs all workers, in this thread and inside the context."""
    token = _running.set(_Code(name, saves))
    try:
        yield
    finally:
        _running.reset(token)


@contextlib.contextmanager
def saving() -> Iterator[None]:
    """Allows all workers to save a model together inside the context."""
    code = _running.get()
    token = _running.set(None if code is not None and code.saves else code)
    try:
        yield
    finally:
        _running.reset(token)


def is_chief_only() -> bool:
    """Returns whether only the chief runs this code."""
    return _running.get() is not None


def check_all_come(what: str) -> None:
    """Raises an error if only the chief runs this.

    Args:
        what: String, what all workers do together, such as "`predict`".

    Raises:
        ReplicaDivergenceError: In the context of `chief_only`.
    """
    code = _running.get()
    if code is not None:
        raise ReplicaDivergenceError(
            f"{what} needs all workers, but only the chief runs {code.name}, "
            f"and would wait forever.\nReceived: {what} in {code.name}. "
            "Expected: a callback that reads `logs` and writes files. Let "
            "this one run on every worker: pass it without "
            "`keras_dist.on_chief`, or do this part in a callback of its own."
        )

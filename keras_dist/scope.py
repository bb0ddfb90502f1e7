"""Scope: what `strategy.scope()` returns."""

import contextlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keras_dist.strategy import Strategy

_Manager = contextlib.AbstractContextManager["Strategy"]


class _Opened(threading.local):
    def __init__(self) -> None:
        self.managers: list[_Manager] = []


class Scope(contextlib.AbstractContextManager["Strategy"]):
    """Opens a strategy's scope each time that it is entered.

    It may be entered again, inside of itself or after it was left, and by
    several threads.

    Args:
        opens: Callable that gives a context manager to be entered once.
    """

    def __init__(self, opens: Callable[[], _Manager]) -> None:
        self._opens = opens
        self._opened = _Opened()

    def __enter__(self) -> "Strategy":
        manager = self._opens()
        strategy = manager.__enter__()
        self._opened.managers.append(manager)
        return strategy

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return self._opened.managers.pop().__exit__(kind, error, traceback)

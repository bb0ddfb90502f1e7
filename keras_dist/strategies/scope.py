"""Scope: the context manager of `strategy.scope()`."""

import contextlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any
from typing import TypeVar

from keras_dist.internals import keras_internals

S = TypeVar("S")


class _Opened(threading.local):
    def __init__(self) -> None:
        # Each with the device that was the default one inside, and with
        # the session that knew it.
        self.managers: list[tuple[Any, Any, object]] = []


class Scope(contextlib.AbstractContextManager[S]):
    """Opens a strategy's scope each time that it is entered.

    It can be nested, entered again, and used by several threads.

    Args:
        opens: Callable that returns a context manager for a single entry.
        default_device: Callable that returns the framework's name of this
            thread's default device.
    """

    def __init__(
        self,
        opens: Callable[[], contextlib.AbstractContextManager[S]],
        default_device: Callable[[], Any],
    ) -> None:
        self._opens = opens
        self._default_device = default_device
        self._opened = _Opened()

    def __enter__(self) -> S:
        manager = self._opens()
        strategy = manager.__enter__()
        self._opened.managers.append(
            (manager, self._default_device(), keras_internals.session())
        )
        return strategy

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        manager, device, session = self._opened.managers[-1]
        now = self._default_device()
        # Keras' session may hold the default device; clearing the session
        # then resets it.
        is_forgotten = now is None and session is not keras_internals.session()
        if kind is None and now != device and not is_forgotten:
            raise RuntimeError(
                "Device scope nesting error: a device scope that was opened "
                "inside of `strategy.scope()` is still open. Received: "
                f"{now!r} is the default device. Expected: {device!r}. Leave "
                "the inner `with` first."
            )
        self._opened.managers.pop()
        suppresses: bool | None = manager.__exit__(kind, error, traceback)
        return suppresses

"""Wraps the first pass of Keras' trainers over their data."""

import contextlib
import functools
import threading
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

from keras_dist.internals.keras_internals import EpochIterator

# Returns, for a trainer's data, a callable that wraps its batches, or `None`.
Wrap = Callable[[Any], Callable[[Any], Any] | None]


class _Watching(threading.local):
    wrap: Wrap | None = None


_watching = _Watching()


@contextlib.contextmanager
def wrapped(wrap: Wrap) -> Iterator[None]:
    """Wraps the first pass over data that trainers read inside the context.

    This is for trainers of this thread whose iterators are made inside. No data
    is read more often than without it. `wrap` is given the data of an iterator,
    and returns a callable that wraps the batches of its first pass, or `None`.
    """
    _install()
    before, _watching.wrap = _watching.wrap, wrap
    try:
        yield
    finally:
        _watching.wrap = before


@functools.cache
def _install() -> None:
    original = EpochIterator.__init__

    @functools.wraps(original)
    def __init__(self: Any, x: Any, *args: Any, **kwargs: Any) -> None:
        original(self, x, *args, **kwargs)
        wrap = None if _watching.wrap is None else _watching.wrap(x)
        if wrap is None:
            return
        waiting, read = [wrap], self._get_iterator

        def _get_iterator() -> Any:
            batches = read()
            return waiting.pop()(batches) if waiting else batches

        self._get_iterator = _get_iterator

    EpochIterator.__init__ = __init__

"""First passes: what Keras' trainers read batches by, wrapped on the way."""

import contextlib
import functools
import threading
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

from keras_dist.internals.keras_internals import EpochIterator

# From a trainer's data to what wraps the batches, or `None`.
Wrap = Callable[[Any], Callable[[Any], Any] | None]


class _Watching(threading.local):
    wrap: Wrap | None = None


_watching = _Watching()


@contextlib.contextmanager
def wrapped(wrap: Wrap) -> Iterator[None]:
    """Inside, the first pass over what a trainer reads can be wrapped.

    Only for trainers of this thread whose iterators are made inside. Nothing
    is read more often than without it.

    Args:
        wrap: Callable from the data of a trainer's iterator to a callable
            that wraps the batches of its first pass; or to `None`.
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

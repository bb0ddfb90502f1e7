"""Looks at the data that a trainer reads, for workers."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import keras

from keras_dist.core.context import replaced
from keras_dist.internals.hooks import as_hook
from keras_dist.internals.keras_data import trainer_of_iterator

# Returns, for a trainer's data and the adapter of it, a callable that wraps its
# batches, or `None`.
Wrap = Callable[[Any, Any], Callable[[Any], Any] | None]


class _WatchOfThread(threading.local):
    def __init__(self) -> None:
        self.wrap: Wrap | None = None
        # Called with each iterator that a trainer makes to shuffle its data.
        self.shuffles: Callable[[Any], None] | None = None
        # Called with each iterator that a model's own methods make.
        self.adapts: Callable[[Any], None] | None = None
        self.model: Any = None


_watching = _WatchOfThread()


def first_pass_wrapped(wrap: Wrap) -> contextlib.AbstractContextManager[None]:
    """Wraps the first pass over data that trainers read inside the context."""
    return replaced(_watching, wrap=wrap)


def shuffles_noted(
    note: Callable[[Any], None],
) -> contextlib.AbstractContextManager[None]:
    """Calls `note` with the iterators that shuffle data inside the context.

    Of Keras' trainers, `fit` shuffles.
    """
    return replaced(_watching, shuffles=note)


def iterators_adapted(
    model: keras.Model, adapt: Callable[[Any], None]
) -> contextlib.AbstractContextManager[None]:
    """Calls `adapt` with the iterators that a model's methods make inside.

    Callbacks may run other models there.
    """
    return replaced(_watching, adapts=adapt, model=model)


@as_hook
def hook_iterator(
    original: Callable[..., Any],
    self: Any,
    x: object,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Stands for `EpochIterator.__init__`, which every trainer calls."""
    original(self, x, *args, **kwargs)
    adapt = _watching.adapts
    if adapt is not None and trainer_of_iterator() is _watching.model:
        adapt(self)
    if _watching.shuffles is not None and kwargs.get("shuffle"):
        _watching.shuffles(self)
    wrap = (
        None if _watching.wrap is None else _watching.wrap(x, self.data_adapter)
    )
    if wrap is None:
        return
    waiting, read = [wrap], self._get_iterator

    def _get_iterator() -> Any:
        batches = read()
        return waiting.pop()(batches) if waiting else batches

    self._get_iterator = _get_iterator

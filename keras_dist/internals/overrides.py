"""Wraps methods that users' subclasses override, and the data of trainers."""

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

from keras_dist.core.context import replaced
from keras_dist.internals.keras_data import EpochIterator
from keras_dist.internals.keras_internals import is_of_keras

# The attribute that marks a wrapped method.
_HOOKED = "_keras_dist_hooked"


def as_hook(
    replacement: Callable[..., Any],
) -> Callable[[Any], Callable[..., Any]]:
    """Makes a hook of a function that is given the original, then its call."""

    def hook(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        # Keras looks for `self` in what it calls.
        def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            return replacement(original, self, *args, **kwargs)

        return method

    return hook


def hook_overrides(
    base: Any, name: str, hook: Callable[[Any], Callable[..., Any]]
) -> None:
    """Wraps a method of all subclasses outside of Keras, also of later ones."""

    def __init_subclass__(cls: Any, /, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        hook_override(cls, name, hook)

    base.__init_subclass__ = classmethod(__init_subclass__)
    classes: list[Any] = base.__subclasses__()
    while classes:
        cls = classes.pop()
        hook_override(cls, name, hook)
        classes += cls.__subclasses__()


def overrides(cls: type, name: str) -> bool:
    """Returns whether a class has a method that is not Keras' own."""
    return not is_of_keras(getattr(cls, name))


def hook_override(cls: Any, name: str, hook: Callable[[Any], Any]) -> None:
    """Wraps a class' method, once, if it is not Keras' own."""
    original = getattr(cls, name)
    if not overrides(cls, name) or hasattr(original, _HOOKED):
        return
    hooked = hook(original)
    setattr(hooked, _HOOKED, True)
    setattr(cls, name, hooked)


# Returns, for a trainer's data, a callable that wraps its batches, or `None`.
Wrap = Callable[[Any], Callable[[Any], Any] | None]


class _WatchOfThread(threading.local):
    def __init__(self) -> None:
        self.wrap: Wrap | None = None
        # Called with each iterator that a trainer makes to shuffle its data.
        self.shuffles: Callable[[Any], None] | None = None


_watching = _WatchOfThread()


def first_pass_wrapped(wrap: Wrap) -> contextlib.AbstractContextManager[None]:
    """Wraps the first pass over data that trainers read inside the context."""
    _install()
    return replaced(_watching, wrap=wrap)


def shuffles_noted(
    note: Callable[[Any], None],
) -> contextlib.AbstractContextManager[None]:
    """Calls `note` with the iterators that shuffle data inside the context.

    Of Keras' trainers, `fit` shuffles.
    """
    _install()
    return replaced(_watching, shuffles=note)


@functools.cache
def _install() -> None:
    original = EpochIterator.__init__

    @functools.wraps(original)
    def __init__(self: Any, x: Any, *args: Any, **kwargs: Any) -> None:
        original(self, x, *args, **kwargs)
        if _watching.shuffles is not None and kwargs.get("shuffle"):
            _watching.shuffles(self)
        wrap = None if _watching.wrap is None else _watching.wrap(x)
        if wrap is None:
            return
        waiting, read = [wrap], self._get_iterator

        def _get_iterator() -> Any:
            batches = read()
            return waiting.pop()(batches) if waiting else batches

        self._get_iterator = _get_iterator

    EpochIterator.__init__ = __init__

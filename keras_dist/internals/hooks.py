"""Attributes of Keras, and of frameworks, that are replaced while needed.

The front end has one table of them, `fit/hooks.py`, and each backend has one.
Nothing else sets attributes of foreign modules and classes.
"""

import collections
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keras_dist.internals.keras_internals import is_of_keras

Method = Callable[..., Any]

# Marks methods of users' classes that are replaced.
_MARK = "_keras_dist_hooked"


def as_hook(replacement: Method) -> Callable[[Any], Method]:
    """Makes a hook of a function that is given the original, then its call."""

    def hook(original: Method) -> Method:
        @functools.wraps(original)
        # Keras looks for `self` in what it calls.
        def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            return replacement(original, self, *args, **kwargs)

        return method

    return hook


def overrides(cls: type, name: str) -> bool:
    """Returns whether a class has a method that is not Keras' own."""
    return not is_of_keras(getattr(cls, name))


@dataclass(frozen=True, eq=False)
class Hook:
    """One row of a table: what is replaced, by what, and why.

    `make` returns the replacement of the original, which it is given. `why`
    ends the sentence "It is replaced so that".
    """

    owner: Any  # a class or a module
    name: str
    make: Callable[[Any], Any]
    why: str
    # Replaces the method of users' subclasses that override it, not this one.
    in_subclasses: bool = False


class Hooks(contextlib.AbstractContextManager[None]):
    """A table of hooks, in place while a context is open or an object lives.

    Each replacement asks whether this thread runs a replica, is in a scope or
    has an object of a strategy; else it does as the original. So others, in
    other threads too, get from Keras what they would get without it.
    """

    def __init__(self, table: Callable[[], Iterable[Hook]]) -> None:
        # Made late, as it imports what it hooks, and once.
        self._table = functools.cache(lambda: tuple(table()))
        self.count = 0  # contexts and objects

    @property
    def rows(self) -> Sequence[Hook]:
        """The rows of the table."""
        return self._table()

    def __enter__(self) -> None:
        self._table()  # not with the lock, as it imports
        _changes.append((self, 1))
        _settle()

    def __exit__(self, *error: object) -> None:
        _changes.append((self, -1))
        _settle()

    def stay_with(self, owner: object) -> None:
        """Keeps the hooks in place until an object is gone."""
        self.__enter__()
        weakref.finalize(owner, self.__exit__).atexit = False


# Tables that one more, or one less, context or object needs.
_changes: collections.deque[tuple[Hooks, int]] = collections.deque()
_lock = threading.RLock()


def _settle() -> None:
    """Makes the changes that wait."""
    with _lock:
        if _places.are_changing:
            return  # the collector of garbage came here from the loop below
        _places.are_changing = True
        try:
            while _changes:
                hooks, by = _changes.popleft()
                hooks.count += by
                if hooks.count == by:
                    _places.add(hooks.rows)
                elif not hooks.count:
                    _places.remove(hooks.rows)
        finally:
            _places.are_changing = False


@functools.cache
def _made(hook: Hook, original: Any) -> Any:
    """Makes a replacement once: compilers compare functions by identity."""
    return hook.make(original)


class _Place:
    """An attribute, what it was, and the hooks on it, the innermost first."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self._own = self._current = self._now()
        self._original = getattr(owner, name, None)
        self.hooks: list[Hook] = []

    def _now(self) -> Any:
        return vars(self.owner).get(self.name)

    @property
    def is_buried(self) -> bool:
        """True once someone else has wrapped our replacement."""
        return self._now() is not self._current

    def update(self) -> None:
        """Sets the attribute, or gives it back if no hook is left."""
        if self.is_buried:
            return
        wanted = self._original
        for hook in self.hooks:
            # Not kept, for what belongs to the user.
            is_users = hook.in_subclasses
            wanted = hook.make(wanted) if is_users else _made(hook, wanted)
        self._current = wanted if self.hooks else self._own
        if self._current is None:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self._current)


class _Places:
    """All attributes that are replaced now."""

    def __init__(self) -> None:
        self.are_changing = False
        self._found: dict[tuple[Any, str], _Place] = {}
        # Tables may have some hooks in common.
        self._counts: collections.Counter[Hook] = collections.Counter()

    def add(self, hooks: Sequence[Hook]) -> None:
        self._counts.update(hooks)
        for hook in hooks:
            if self._counts[hook] > 1:
                continue
            if not hook.in_subclasses:
                self._put(hook.owner, hook.name, hook)
                continue
            self._put(hook.owner, _watch(hook).name, _watch(hook))
            classes = [hook.owner]
            for cls in classes:
                classes += cls.__subclasses__()
                self.override(cls, hook)

    def remove(self, hooks: Sequence[Hook]) -> None:
        self._counts.subtract(hooks)
        gone = {hook for hook in hooks if not self._counts[hook]}
        gone |= {_watch(hook) for hook in gone if hook.in_subclasses}
        for key, place in list(self._found.items()):
            if gone.isdisjoint(place.hooks):
                continue
            place.hooks = [each for each in place.hooks if each not in gone]
            place.update()
            # A replacement below someone else's does no harm, and is found
            # again here.
            if not place.hooks and not place.is_buried:
                del self._found[key]

    def override(self, cls: Any, hook: Hook) -> None:
        """Puts a hook on a user's class, if it overrides the method."""
        is_users = self._counts[hook] and overrides(cls, hook.name)
        if is_users and not hasattr(getattr(cls, hook.name), _MARK):
            self._put(cls, hook.name, hook)
            setattr(getattr(cls, hook.name), _MARK, True)

    def _put(self, owner: Any, name: str, hook: Hook) -> None:
        key = owner, name
        place = self._found.get(key) or _Place(owner, name)
        self._found[key] = place
        place.hooks.append(hook)
        place.update()


_places = _Places()


@functools.cache
def _watch(hook: Hook) -> Hook:
    """Returns a hook that puts another one on classes that are made later."""
    base = hook.owner

    def make(_: Any) -> Any:
        def __init_subclass__(cls: Any, /, **kwargs: Any) -> None:
            super(base, cls).__init_subclass__(**kwargs)
            with _lock:
                _places.override(cls, hook)

        return classmethod(__init_subclass__)

    return Hook(base, "__init_subclass__", make, hook.why)

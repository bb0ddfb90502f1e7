"""Attributes of Keras, and of frameworks, that are replaced while needed.

The front end has one table of them, `fit/hooks.py`, and each backend has one.
Nothing else sets attributes of foreign modules and classes.
"""

import collections
import contextlib
import functools
import inspect
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

        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        return method if _has_self(original) else function

    return hook


def _has_self(original: Method) -> bool:
    try:
        return "self" in inspect.signature(original).parameters
    except ValueError:  # written in C
        return True


def seen_warnings(see: Callable[[str], bool]) -> Callable[[Any], Any]:
    """Makes a hook on the name `warnings` of a module: `see(text)` of each that
    it gives returns true to drop it, or raises an error in its place.

    Python's own filters are the same for all threads.
    """
    return lambda original: _SeenWarnings(original, see)


class _SeenWarnings:
    """Stands for the module `warnings` in another module."""

    def __init__(self, original: Any, see: Callable[[str], bool]) -> None:
        self._original, self._see = original, see

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def warn(
        self,
        message: Any,
        category: Any = None,
        stacklevel: int = 1,
        source: Any = None,
        **options: Any,
    ) -> None:
        if not self._see(str(message)):
            warn = self._original.warn
            warn(message, category, stacklevel + 1, source, **options)


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
        self.rows = functools.cache(lambda: tuple(table()))
        self.count = 0  # contexts and objects

    def __enter__(self) -> None:
        self.rows()  # not with the lock, as it imports
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
                    _places.add(hooks.rows())
                elif not hooks.count:
                    _places.remove(hooks.rows())
        finally:
            _places.are_changing = False


class _Place:
    """An attribute, what it was, and the hooks on it, the innermost first."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.original = getattr(owner, name, None)
        self.hooks: tuple[Hook, ...] = ()
        self.own = self.current = vars(owner).get(name)
        # The values of the attribute, by hooks. Each is made once: compilers
        # compare functions by identity.
        self.made: dict[tuple[Hook, ...], Any] = {(): self.own}

    def make(self) -> Any:
        """Makes the value of the attribute with the hooks that it has."""
        made = self.original
        for hook in self.hooks:
            made = hook.make(made)
        self.made[self.hooks] = made
        return made


class _Places:
    """All attributes that are, or were, replaced.

    Tables come and go with each call of `run` in a program without variables,
    so `add` and `remove` call no functions of Python's.
    """

    def __init__(self) -> None:
        self.are_changing = False
        self._known: dict[tuple[Any, str], _Place] = {}
        # How many tables in use have a hook.
        self._counts: collections.Counter[Hook] = collections.Counter()
        # Methods of users' classes, by the hook that they have.
        self._users: dict[Hook, list[_Place]] = {}

    def add(self, hooks: Sequence[Hook]) -> None:
        for hook in hooks:
            self._counts[hook] = count = self._counts.get(hook, 0) + 1
            if count > 1:
                continue
            owner, name = hook.owner, hook.name
            if hook.in_subclasses:
                self._users[hook] = []
                classes = owner.__subclasses__()
                for cls in classes:
                    classes += cls.__subclasses__()
                    if not cls.__module__.startswith("keras."):
                        self.override(cls, hook)
                hook, name = _watch(hook), "__init_subclass__"
            place, now = self._known.get((owner, name)), vars(owner).get(name)
            # Changed by someone else, while it was not ours.
            if place is None or now is not place.own is place.current:
                place = self._known[owner, name] = _Place(owner, name)
            place.hooks += (hook,)
            # Else someone else has wrapped ours, and it is found in there.
            if now is place.current:
                made = place.made.get(place.hooks)
                place.current = place.make() if made is None else made
                setattr(owner, name, place.current)

    def remove(self, hooks: Sequence[Hook]) -> None:
        for hook in hooks:
            self._counts[hook] -= 1
            if self._counts[hook]:
                continue
            owner, name = hook.owner, hook.name
            if hook.in_subclasses:
                for place in self._users.pop(hook):
                    self._restore(place)
                hook, name = _watch(hook), "__init_subclass__"
            place = self._known[owner, name]
            left = list(place.hooks)
            left.remove(hook)
            place.hooks = tuple(left)
            if vars(owner).get(name) is not place.current:
                continue
            if not left and place.own is None:
                place.current = None
                delattr(owner, name)
                continue
            made = place.made.get(place.hooks)
            place.current = place.make() if made is None else made
            setattr(owner, name, place.current)

    def override(self, cls: Any, hook: Hook) -> None:
        """Puts a hook on a user's class, if it overrides the method."""
        name = hook.name
        is_users = self._counts[hook] and overrides(cls, name)
        if not is_users or hasattr(getattr(cls, name), _MARK):
            return
        place = _Place(cls, name)
        place.hooks = (hook,)
        place.current = place.make()
        setattr(place.current, _MARK, True)
        setattr(cls, name, place.current)
        self._users[hook].append(place)

    def _restore(self, place: _Place) -> None:
        if vars(place.owner).get(place.name) is not place.current:
            return
        if place.own is None:
            delattr(place.owner, place.name)
        else:
            setattr(place.owner, place.name, place.own)


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

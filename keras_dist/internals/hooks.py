"""Attributes of Keras, and of frameworks, that are replaced while needed.

They stand in tables. `fit/hooks.py` has the one of all strategies, with that of
the backend in it. Some executors and commands have rows of their own.
"""

import collections
import contextlib
import functools
import inspect
import os
import threading
import types
import weakref
from collections.abc import Callable
from collections.abc import Iterable
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
        self._table = table
        self._rows: tuple[Hook, ...] = ()
        self.count = 0  # contexts and objects

    def rows(self) -> tuple[Hook, ...]:
        """Returns the rows of the table, always the same."""
        if not self._rows:
            # Made late, as it imports what it hooks, and without the lock.
            made = tuple(self._table())
            with _lock:
                self._rows = self._rows or made
        return self._rows

    def __enter__(self) -> None:
        if not self._rows:
            self.rows()
        _places.change(self)

    def __exit__(self, *error: object) -> None:
        _left.append(self)
        _places.change()

    def stay_with(self, owner: object) -> None:
        """Keeps the hooks in place until an object is gone."""
        self.__enter__()
        weakref.finalize(owner, self.__exit__).atexit = False


# Tables that a context or an object has left, once for each.
_left: collections.deque[Hooks] = collections.deque()
_lock = threading.RLock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()
    _places.is_changing = False


# In a child, the thread that has the lock may be missing.
os.register_at_fork(after_in_child=_renew_lock)


class _Place:
    """An attribute, and the hooks on it, the innermost first."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.hooks: tuple[Hook, ...] = ()
        # What the owner itself has, without hooks and now; `None` if nothing.
        self.before = self.current = vars(owner).get(name)
        self._original = getattr(owner, name, None)
        # Values by their hooks: compilers compare functions by identity.
        self.made: dict[tuple[Hook, ...], Any] = {(): self.before}
        # This place before someone else wrapped what it had, if it had hooks.
        self.under: _Place | None = None

    def make(self, hooks: Iterable[Hook]) -> Any:
        """Makes the value of the attribute with some hooks."""
        under = set(self.under.hooks) if self.under is not None else ()
        new = [hook for hook in hooks if hook not in under]
        made = self._original if new else self.before
        for hook in new:
            made = hook.make(made)
        return made

    def found_again(self) -> "_Place":
        """Returns the place to go on with, after someone else's change."""
        now = vars(self.owner).get(self.name)
        if self.under is not None and now is self.under.current:
            return self.under  # they took theirs off
        again = _Place(self.owner, self.name)
        if self.hooks and _leads_to(now, self.current):
            again.under = self
        return again

    def restore(self) -> None:
        """Takes the hooks away, unless someone else has changed it."""
        if vars(self.owner).get(self.name) is not self.current:
            return
        if self.before is None:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


class _Places:
    """All attributes that are, or were, replaced."""

    def __init__(self) -> None:
        self.is_changing = False
        self._tables: tuple[Hooks, ...] = ()  # that are in place
        self._known: dict[tuple[Any, str], _Place] = {}
        # By tables: the hooks on each attribute.
        self._wanted: dict[tuple[Hooks, ...], dict[Any, tuple[Hook, ...]]] = {}
        # Methods of users' classes, by the hook that they have.
        self._users: dict[Hook, list[_Place]] = {}

    def change(self, entering: Hooks | None = None) -> None:
        """Counts a table up, and those down that were left."""
        with _lock:
            if self.is_changing:
                return  # the collector of garbage came here from below
            self.is_changing = True
            try:
                if entering is not None:
                    tables = self._tables
                    if entering not in tables:
                        tables = (*tables, entering)
                    self._update(tables)
                    entering.count += 1
                while _left:
                    left = _left.popleft()
                    left.count -= 1
                    if not left.count:
                        rest = list(self._tables)
                        rest.remove(left)
                        self._update(tuple(rest))
            finally:
                self.is_changing = False
        if _left:  # since the loop has ended
            self.change()

    def join(self, cls: type, hook: Hook) -> None:
        """Puts a hook on a new class of a user's, if it is in place."""
        with _lock:
            self.is_changing = True
            try:
                if hook in self._users:
                    self._override(cls, hook)
            finally:
                self.is_changing = False
        self.change()

    def _update(self, tables: tuple[Hooks, ...]) -> None:
        """Gives each attribute the hooks that some tables have for it.

        That happens with each `run` in a program without variables. So it calls
        no function of Python's for an attribute that it has replaced before.
        """
        if tables not in self._wanted:
            self._wanted[tables] = self._hooks_of(tables)
        wanted = self._wanted[tables]
        try:
            for key, place in self._known.items():
                hooks = wanted.get(key, ())
                owner, name = key
                # Others may have replaced it, too, or put it back.
                is_known = vars(owner).get(name) is place.current
                if is_known and hooks == place.hooks:
                    continue
                if not is_known:
                    place = self._known[key] = place.found_again()
                if hooks not in place.made:
                    place.made[hooks] = place.make(hooks)
                value = place.made[hooks]
                if value is place.current:
                    pass
                elif value is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, value)
                place.hooks, place.current = hooks, value
            rows = wanted.get(None, ())
            for hook in rows:
                if hook in self._users:
                    continue
                self._users[hook] = []
                classes = hook.owner.__subclasses__()
                for cls in classes:
                    classes += cls.__subclasses__()
                    if not cls.__module__.startswith("keras."):
                        self._override(cls, hook)
            for hook in self._users.keys() - set(rows):
                for place in self._users.pop(hook):
                    place.restore()
        except BaseException:  # of a hook that can't be made, or Ctrl-C
            if tables is not self._tables:
                self._update(self._tables)
            raise
        self._tables = tables

    def _hooks_of(self, tables: tuple[Hooks, ...]) -> Any:
        """Returns the hooks of tables by attribute; `None` has the rows for
        subclasses."""
        rows = dict.fromkeys(row for table in tables for row in table.rows())
        hooks: dict[Any, tuple[Hook, ...]] = {}
        for row in rows:
            if row.in_subclasses:
                hooks[None] = (*hooks.get(None, ()), row)
            hook = _watch(row) if row.in_subclasses else row
            key = hook.owner, hook.name
            hooks[key] = (*hooks.get(key, ()), hook)
            if key not in self._known:
                self._known[key] = _Place(*key)
        return hooks

    def _override(self, cls: Any, hook: Hook) -> None:
        """Puts a hook on a user's class, if it overrides the method."""
        method = getattr(cls, hook.name)
        if not overrides(cls, hook.name) or (
            getattr(method, _MARK, None) is method
        ):
            return
        place = _Place(cls, hook.name)
        place.current = place.make([hook])
        setattr(place.current, _MARK, place.current)
        setattr(cls, hook.name, place.current)
        self._users[hook].append(place)


_places = _Places()


def _leads_to(value: object, ours: object) -> bool:
    """Returns whether a function that someone else has made calls ours."""
    ours = getattr(ours, "__func__", ours)
    waiting, seen = [value], set[int]()
    for candidate in waiting:  # which grows
        if candidate is ours:
            return True
        is_function = callable(candidate) and not isinstance(candidate, type)
        if isinstance(candidate, (staticmethod, classmethod, types.MethodType)):
            waiting.append(candidate.__func__)
        elif is_function and id(candidate) not in seen and len(seen) < 100:
            seen.add(id(candidate))
            if isinstance(candidate, functools.partial):
                waiting.append(candidate.func)
            waiting += getattr(candidate, "__dict__", {}).values()
            for cell in getattr(candidate, "__closure__", None) or ():
                with contextlib.suppress(ValueError):  # not assigned yet
                    waiting.append(cell.cell_contents)
    return False


@functools.cache
def _watch(hook: Hook) -> Hook:
    """Returns a hook that puts another one on classes that are made later."""
    base = hook.owner

    def make(_: object) -> Any:
        def __init_subclass__(cls: Any, /, **kwargs: Any) -> None:
            super(base, cls).__init_subclass__(**kwargs)
            _places.join(cls, hook)

        return classmethod(__init_subclass__)

    return Hook(base, "__init_subclass__", make, hook.why)

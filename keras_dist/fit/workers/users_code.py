"""A user's code: a hash of it, and the values and objects that it reads."""

import argparse
import dis
import functools
import inspect
import itertools
import sys
import sysconfig
import types
import weakref
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from typing import NamedTuple

import keras
import numpy as np

from keras_dist.fit.workers.agreement import hash_of
from keras_dist.internals.keras_internals import Saveable

# Values that code reads count if they are of these types: others tell workers
# apart on purpose, such as a rank, or whether this is the chief.
_SETTINGS = (float, str, np.floating)
# Elements of an array that code reads, at most.
_MOST_ELEMENTS = 100_000
# Items of a list or dict that are looked at, at most.
_MOST_ITEMS = 1000
# Methods that a user may replace on the chief alone.
SAVES = {"save", "save_weights", "export", "summary"}
# Methods that say nothing of what the rest of a class reads.
_MAKES = {"__init__", "get_config", "from_config", *SAVES}
# Objects inside of objects that are described, at most.
_DEPTH = 8
_classes: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
_PATHS = sysconfig.get_paths()
_INSTALLED = tuple(
    _PATHS[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


def is_users_code(value: object) -> bool:
    """Tells whether a user's function, or an object to call, is an attribute,
    such as a regularizer."""
    if not callable(value) and not hasattr(type(value), "__get__"):
        return False  # what most are, which `inspect` takes long to say
    if inspect.isroutine(value):
        return is_users(inspect.unwrap(value))
    is_object = callable(value) and not isinstance(value, (type, Saveable))
    return is_object and is_users(type(value))


def read_by_class(thing: object) -> dict[str, Any]:
    """Returns the settings that the methods of an object's class read."""
    values: dict[str, Any] = {}
    attributes: dict[str, Any] = {}
    codes: list[types.CodeType] = []
    for base in filter(is_users, reversed(type(thing).__mro__)):
        attributes |= vars(base)
    for function in _methods_of(type(thing)):
        codes += codes_in(function.__code__)
        values |= outer_values(function)
    attributes |= getattr(thing, "__dict__", {})
    read = {name for code in codes for name in code.co_names}
    values |= {n: v for n, v in attributes.items() if n in read}
    return {**settings_in(values, codes), **functions_in(values)}


def functions_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the user's functions, which are described too."""
    return {
        name: value
        for name, value in values.items()
        if inspect.isfunction(value) and is_users(value)
    }


def _function_in(value: object) -> Any:
    """Returns the function of a method or a property, `None` for others."""
    value = value.fget if isinstance(value, property) else value
    value = getattr(value, "__func__", value)
    return value if inspect.isfunction(value) else None


def settings_in(
    values: Mapping[str, Any], codes: Sequence[types.CodeType]
) -> dict[str, Any]:
    """Returns what counts of values that code reads, by name."""
    names = {name for code in codes for name in code.co_names}
    keys = {c for code in codes for c in code.co_consts if isinstance(c, str)}
    settings = {}
    for name, value in values.items():
        if not name.startswith("_"):
            setting = _setting(value, names, keys, _DEPTH)
            if setting is not None:
                settings[name] = setting
    return settings


def _setting(value: object, names: set[str], keys: set[str], depth: int) -> Any:
    """Returns what counts of one value: `None` for nothing.

    Of containers, that is what the code names: keys, or attributes."""
    if isinstance(value, _SETTINGS) or depth == 0:
        return value if isinstance(value, _SETTINGS) else None
    if isinstance(value, np.ndarray):
        is_float = np.issubdtype(value.dtype, np.floating)
        return value if is_float and value.size <= _MOST_ELEMENTS else None
    if isinstance(value, (list, tuple)):
        items: dict[Any, Any] = dict(enumerate(value))
    elif isinstance(value, Mapping):
        items = {k: v for k, v in value.items() if k in keys}
    elif _has_settings(value):
        items = {
            k: v
            for k, v in vars(value).items()
            if k in names and not k.startswith("_")
        }
    else:
        return None
    settings = {
        key: setting
        for key, item in items.items()
        if (setting := _setting(item, names, keys, depth - 1)) is not None
    }
    return settings or None


def _has_settings(value: object) -> bool:
    """Tells whether settings may be attributes of an object or a module."""
    if isinstance(value, types.ModuleType):
        file = getattr(value, "__file__", None)
        return file is not None and not file.startswith(_INSTALLED)
    if isinstance(value, (keras.Variable, Saveable)) or callable(value):
        return False
    is_namespace = isinstance(value, (argparse.Namespace, SimpleNamespace))
    return is_namespace or (
        hasattr(value, "__dict__") and is_users(type(value))
    )


def outer_values(function: Any) -> dict[str, Any]:
    """Returns the values of the globals and cells that a function reads."""
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
    return {
        **{n: function.__globals__.get(n) for n in sorted(_globals_in(code))},
        **{name: _content(cell) for name, cell in cells},
    }


class Reached(NamedTuple):
    """The code that a user's function runs, and what is used in it."""

    codes: list[types.CodeType]
    # Layers, optimizers, losses and metrics, by name.
    objects: dict[str, Saveable]
    variables: list[keras.Variable]


def reached(thing: object) -> Reached:
    """Returns what a function, or a nest of functions and objects, comes to."""
    result = Reached([], {}, [])
    seen: dict[int, Any] = {}  # keeps them, so that ids are not used again

    def visit(name: str, value: object) -> None:
        if id(value) in seen:
            return
        seen[id(value)] = value
        if isinstance(value, functools.partial):
            visit(name, [value.func, value.args, value.keywords])
        elif isinstance(value, keras.Variable):
            result.variables.append(value)
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value[:_MOST_ITEMS]):
                visit(f"{name}[{index}]", item)
        elif isinstance(value, dict):
            for key in itertools.islice(value, _MOST_ITEMS):
                visit(f"{name}[{key!r}]", value[key])
        elif inspect.ismethod(value):
            visit_function(value.__func__, value.__self__)
        elif inspect.isfunction(value):
            visit_function(value, None)
        elif isinstance(value, Saveable) or (
            is_users(type(value)) and callable(value)
        ):
            if isinstance(value, Saveable):
                result.objects[name] = value
            for method in _methods_of(type(value)):
                visit_function(method, value)

    def visit_function(function: Any, owner: Any) -> None:
        function = inspect.unwrap(function)
        if not inspect.isfunction(function) or not is_users(function):
            return
        codes = [*codes_in(function.__code__)]
        result.codes.append(codes[0])
        for name, value in outer_values(function).items():
            if not name.startswith("_") or inspect.isfunction(value):
                visit(name, value)
        attributes = getattr(owner, "__dict__", {})
        for name in sorted({n for code in codes for n in code.co_names}):
            if name in attributes:
                visit(f"self.{name}", attributes[name])

    visit("it", thing)
    return result


def _methods_of(cls: type) -> Iterator[Any]:
    """Yields the functions of a user's class that compute something."""
    for base in filter(is_users, reversed(cls.__mro__)):
        for name, value in vars(base).items():
            function = _function_in(value)
            if function is not None and name not in _MAKES:
                yield function


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty yet
        return None


def _globals_in(code: types.CodeType) -> set[str]:
    return {
        step.argval
        for nested in codes_in(code)
        for step in dis.get_instructions(nested)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields the code of a function, and of those inside of it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from codes_in(const)


def code_text(code: types.CodeType) -> str:
    """Returns a hash of a function's code, without its file and lines."""
    consts = [
        code_text(const)
        if isinstance(const, types.CodeType)
        # The order of a set depends on the process.
        else repr(sorted(map(repr, const)))
        if isinstance(const, frozenset)
        else repr(const)
        for const in code.co_consts
    ]
    text = repr((code.co_names, code.co_varnames, consts))
    return hash_of(code.co_code + text.encode())


def class_text(cls: type) -> str:
    """Describes a class: its name, and its code if it is the user's."""
    if cls not in _classes:
        codes = []
        for base in filter(is_users, cls.__mro__):
            for name, value in sorted(vars(base).items()):
                function = _function_in(value)
                if function is not None:
                    codes.append(f"{name} {code_text(function.__code__)}")
        suffix = f" {hash_of(repr(codes).encode())}" if codes else ""
        _classes[cls] = f"{cls.__qualname__}{suffix}"
    return _classes[cls]


def is_users(definition: object) -> bool:
    """Tells whether a class or function is of no installed package."""
    name = getattr(definition, "__module__", None) or ""
    package = name.partition(".")[0]
    if package in ("builtins", "keras") or package.startswith("keras_dist"):
        return False
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    # Neither has what a notebook or a test made.
    return file is None or not file.startswith(_INSTALLED)

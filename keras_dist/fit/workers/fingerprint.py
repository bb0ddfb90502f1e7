"""Descriptions of what a call of `fit` or a relative computes, to compare.

Configurations are described by their entries. Code that has none, such as a
function, is described by its code, and by the plain values that it refers to.
Names that Keras numbers don't count, and neither do values of variables, which
become the chief's.
"""

import argparse
import contextlib
import dis
import functools
import hashlib
import inspect
import json
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np

from keras_dist.environment.packages import version_of
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.internals import keras_internals
from keras_dist.internals import keras_saveables
from keras_dist.internals.keras_internals import Saveable
from keras_dist.plugin.workers import Workers

# Entry by entry, in words that tell one value from another.
Fingerprint = dict[str, str]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
# Values that code reads count if they are of these types: others tell workers
# apart on purpose, such as a rank, or whether this is the chief.
_SETTINGS = (float, str, np.floating)
# Elements of an array that code reads, at most.
_MOST_ELEMENTS = 100_000
# Methods that a user may replace on the chief alone.
_SAVES = {"save", "save_weights", "export", "summary"}
# Methods that say nothing of what the rest of a class reads.
_MAKES = {"__init__", "get_config", "from_config", *_SAVES}
# Keys of configurations that say nothing of what is computed: names are
# numbered, and initial values are the chief's.
_SKIPPED = {"name", "seed", "shared_object_id", "build_config", "iterations"}
# Objects inside of objects that are described, at most.
_DEPTH = 8
_MOST_SHOWN = 5
# Characters of a value in errors; others end with a code of the whole.
_LONG = 120


def of_process(callbacks: Sequence[Any]) -> Fingerprint:
    """Describes versions, Keras' settings, and callbacks by their names."""
    backend = keras.backend.backend()
    return {
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "Keras": keras.__version__,
        # What follows a plus says for which devices it was built.
        "backend": f"{backend} {str(version_of(backend)).partition('+')[0]}",
        "floatx": keras.config.floatx(),
        "dtype policy": str(keras.config.dtype_policy().name),
        "image data format": keras.config.image_data_format(),
        "epsilon": repr(keras.config.epsilon()),
        "callbacks": ", ".join(map(of_callback, callbacks)),
    }


def of_compile(model: keras.Model) -> Fingerprint:
    """Describes what a model was compiled with."""
    arguments = keras_internals.compile_arguments(model) or {}
    found = {
        f"compile({name}=...)": _text(value, {})
        for name, value in arguments.items()
        if name not in ("self", "optimizer")
    }
    for place, optimizer in keras_saveables.all_optimizers(model).items():
        found |= _of_object(f"optimizer `{place}`", optimizer, {})
    return found


def stamp_of(model: keras.Model) -> list[tuple[int, bool]]:
    """Returns what tells quickly that a model has other layers than before."""
    return [(id(each), each.trainable) for each in model._flatten_layers()]


def of_layers(model: keras.Model) -> Fingerprint:
    """Describes a model's layers."""
    layers = list(model._flatten_layers())
    parts = [o for each in layers for o in getattr(each, "operations", ())]
    names = {
        part.name: f"#{index}" for index, part in enumerate([*layers, *parts])
    }
    found: Fingerprint = {}
    for index, layer in enumerate(layers):
        what = f"layer {index} ({type(layer).__name__})"
        found |= _of_object(what, layer, names)
        found[f"{what}: trainable"] = str(layer.trainable)
    return found


def _is_users_code(value: Any) -> bool:
    """Tells whether a user's function, or an object to call, is an attribute,
    such as a regularizer."""
    if inspect.isroutine(value):
        return _is_users(inspect.unwrap(value))
    is_object = callable(value) and not isinstance(value, (type, Saveable))
    return is_object and _is_users(type(value))


def of_callback(callback: Any) -> str:
    """Describes a callback by its class, and what was passed to it."""
    if not isinstance(callback, keras.callbacks.EarlyStopping):
        return type(callback).__name__
    passed = inspect.signature(keras.callbacks.EarlyStopping).parameters
    values = {
        name: vars(callback).get(name) for name in passed if name != "verbose"
    }
    return f"{type(callback).__name__}({_text(values, {})})"


def _of_object(what: str, thing: Any, names: Mapping[str, str]) -> Fingerprint:
    """Describes an object with a configuration, entry by entry."""
    found = {what: _class_text(type(thing))}
    for name, value in _config_of(thing).items():
        if name not in _SKIPPED:
            found[f"{what}: {name}"] = _text(value, names)
    for name, value in vars(thing).items():
        if name not in _SAVES and _is_users_code(value):
            found[f"{what}: {name}"] = _text(value, names)
    return found


def _config_of(thing: Any) -> dict[str, Any]:
    """Returns an object's configuration, and what a user's class reads."""
    config = None
    if _has_lambda(thing):
        # Its configuration would have the lambda's file and line.
        config = {
            name: value
            for name, value in vars(thing).items()
            if (name not in _SAVES and _is_users_code(value))
            or (
                isinstance(value, (*_PLAIN, dict, list, tuple))
                and not name.startswith("_")
                # The layers of a model are described one by one.
                and not isinstance(thing, keras.Model)
            )
        }
    else:
        # A class of the user's may have none, or a faulty one.
        with contextlib.suppress(Exception):
            # The method of the class: that of a model adds the strategy.
            config = type(thing).get_config(thing)
    config = config if isinstance(config, dict) else {}
    if _is_users(type(thing)):
        config = {**_read_by_class(thing), **config}
    return config


def _has_lambda(thing: Any) -> bool:
    is_layer = isinstance(thing, keras.Layer)
    return any(
        inspect.isfunction(value)
        and value.__name__ == "<lambda>"
        and name not in _SAVES
        for each in (thing._flatten_layers() if is_layer else [thing])
        for name, value in getattr(each, "__dict__", {}).items()
    )


def _read_by_class(thing: Any) -> dict[str, Any]:
    """Returns the settings that the methods of an object's class read."""
    values: dict[str, Any] = {}
    attributes: dict[str, Any] = {}
    codes: list[types.CodeType] = []
    for base in filter(_is_users, reversed(type(thing).__mro__)):
        for name, value in vars(base).items():
            function = _function_in(value)
            if function is None:
                attributes[name] = value
            elif name not in _MAKES:
                codes += _codes_in(function.__code__)
                values |= _outer_values(function)
    attributes |= getattr(thing, "__dict__", {})
    read = {name for code in codes for name in code.co_names}
    values |= {n: v for n, v in attributes.items() if n in read}
    return {**_settings_in(values, codes), **_functions_in(values)}


def _functions_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the user's functions, which are described too."""
    return {
        name: value
        for name, value in values.items()
        if inspect.isfunction(value) and _is_users(value)
    }


def _function_in(value: Any) -> Any:
    """Returns the function of a method or a property, `None` for others."""
    value = value.fget if isinstance(value, property) else value
    value = getattr(value, "__func__", value)
    return value if inspect.isfunction(value) else None


def _settings_in(
    values: Mapping[str, Any], codes: Sequence[types.CodeType]
) -> dict[str, Any]:
    """Returns what counts of values that code reads, by name."""
    names = {name for code in codes for name in code.co_names}
    keys = {c for code in codes for c in code.co_consts if isinstance(c, str)}
    found = {}
    for name, value in values.items():
        if not name.startswith("_"):
            setting = _setting(value, names, keys, _DEPTH)
            if setting is not None:
                found[name] = setting
    return found


def _setting(value: Any, names: set[str], keys: set[str], depth: int) -> Any:
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
    found = {
        key: setting
        for key, item in items.items()
        if (setting := _setting(item, names, keys, depth - 1)) is not None
    }
    return found or None


def _has_settings(value: Any) -> bool:
    """Tells whether settings may be attributes of an object or a module."""
    if isinstance(value, types.ModuleType):
        file = getattr(value, "__file__", None)
        return file is not None and not file.startswith(_INSTALLED)
    if isinstance(value, (keras.Variable, Saveable)) or callable(value):
        return False
    is_namespace = isinstance(value, (argparse.Namespace, SimpleNamespace))
    return is_namespace or (
        hasattr(value, "__dict__") and _is_users(type(value))
    )


def compare(own: Fingerprint, codes: Sequence[int], workers: Workers) -> None:
    """Raises an error that names what differs, if workers' codes do."""
    if len(set(codes)) == 1:
        return
    shown = {name: _shortened(value) for name, value in own.items()}
    everyone = [json.loads(t) for t in workers.texts(json.dumps(shown))]
    other = next(i for i, code in enumerate(codes) if code != codes[0])
    first, theirs = everyone[0], everyone[other]
    names = [n for n in {**first, **theirs} if first.get(n) != theirs.get(n)]
    # Those of a whole model come last.
    names.sort(key=lambda name: len(first.get(name, "")) > _LONG)
    found = [
        f"{name}: {first.get(name, 'nothing')} on worker 0, "
        f"{theirs.get(name, 'nothing')} on worker {other}"
        for name in names[:_MOST_SHOWN]
    ]
    if not found:
        return
    more = len(names) - len(found)
    raise ReplicaDivergenceError(
        "Workers are about to compute different things, so their weights "
        f"would part. Received: {'; '.join(found)}"
        f"{f'; and {more} more' if more > 0 else ''}. Expected: the same "
        "model, settings and versions on every worker. Look for environment "
        "variables that only some workers have, for files that differ, and "
        "for code that only some workers run. A value of your own that may "
        "differ, such as a path, has a name that begins with an underscore."
    )


def code_of(fingerprint: Fingerprint) -> int:
    """Returns a hash of a fingerprint, below 2**62."""
    digest = hashlib.blake2b(
        json.dumps(fingerprint, sort_keys=True).encode(), digest_size=8
    ).digest()
    return int.from_bytes(digest, "little") >> 2


def _shortened(text: str) -> str:
    if len(text) <= _LONG:
        return text
    return f"{text[:_LONG]}... ({_hash(text.encode())})"


def _text(value: Any, names: Mapping[str, str], depth: int = _DEPTH) -> str:
    """Describes any value; `names` stand for those of layers."""
    if isinstance(value, str):
        return repr(names.get(value, value))
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, np.generic):
        return repr(value.item())
    if isinstance(value, type):
        return _class_text(value)
    if isinstance(value, keras.Variable) or depth == 0:
        return type(value).__name__

    def inner(value: Any) -> str:
        return _text(value, names, depth - 1)

    if isinstance(value, Mapping):
        items = value.items()
        kept = [
            f"{inner(k)}: {inner(v)}" for k, v in items if k not in _SKIPPED
        ]
        return f"{{{', '.join(sorted(kept))}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(inner, value)))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(inner, value))}]"
    if isinstance(value, np.ndarray) or keras.ops.is_tensor(value):
        array = np.asarray(keras.ops.convert_to_numpy(value))
        return f"{array.dtype}{list(array.shape)} {_hash(array.tobytes())}"
    if isinstance(value, functools.partial):
        return f"partial {inner((value.func, value.args, value.keywords))}"
    if inspect.isroutine(value):
        return _function_text(value, inner)
    if hasattr(value, "get_config"):
        return f"{_class_text(type(value))}({inner(_config_of(value))})"
    settings = _read_by_class(value) if _is_users(type(value)) else {}
    return f"{_class_text(type(value))}({inner(settings)})"


def _function_text(value: Any, inner: Callable[[Any], str]) -> str:
    function = inspect.unwrap(getattr(value, "__func__", value))
    code = getattr(function, "__code__", None)
    if code is None or not _is_users(function):
        return f"{getattr(function, '__module__', '')}.{function.__name__}"
    known = _outer_values(function)
    settings = _settings_in(known, [*_codes_in(code)])
    parts = (
        [function.__defaults__, function.__kwdefaults__],
        {**settings, **_functions_in(known)},
    )
    return f"{function.__name__} {_code_text(code)} {inner(parts)}"


def _outer_values(function: Any) -> dict[str, Any]:
    """Returns the values of the globals and cells that a function reads."""
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
    return {
        **{n: function.__globals__.get(n) for n in sorted(_globals_in(code))},
        **{name: _content(cell) for name, cell in cells},
    }


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty yet
        return None


def _globals_in(code: types.CodeType) -> set[str]:
    return {
        step.argval
        for each in _codes_in(code)
        for step in dis.get_instructions(each)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields the code of a function, and of those inside of it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes_in(const)


def _code_text(code: types.CodeType) -> str:
    """Returns a hash of a function's code, without its file and lines."""
    consts = [
        _code_text(const)
        if isinstance(const, types.CodeType)
        # The order of a set depends on the process.
        else repr(sorted(map(repr, const)))
        if isinstance(const, frozenset)
        else repr(const)
        for const in code.co_consts
    ]
    told = repr((code.co_names, code.co_varnames, consts))
    return _hash(code.co_code + told.encode())


_classes: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()


def _class_text(cls: type) -> str:
    """Describes a class: its name, and its code if it is the user's."""
    if cls not in _classes:
        codes = []
        for base in filter(_is_users, cls.__mro__):
            for name, value in sorted(vars(base).items()):
                function = _function_in(value)
                if function is not None:
                    codes.append(f"{name} {_code_text(function.__code__)}")
        own = f" {_hash(repr(codes).encode())}" if codes else ""
        _classes[cls] = f"{cls.__qualname__}{own}"
    return _classes[cls]


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=4).hexdigest()


def _is_users(definition: Any) -> bool:
    """Tells whether a class or function is of no installed package."""
    name = getattr(definition, "__module__", None) or ""
    package = name.partition(".")[0]
    if package in ("builtins", "keras") or package.startswith("keras_dist"):
        return False
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    # Neither has what a notebook or a test made.
    return file is None or not file.startswith(_INSTALLED)


_PATHS = sysconfig.get_paths()
_INSTALLED = tuple(
    _PATHS[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")
)

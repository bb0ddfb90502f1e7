"""Descriptions of what a call of `fit` or a relative computes, to compare.

Configurations are described by their entries. Code that has none, such as a
function, is described by its code, and by the plain values that it refers to.
Names that Keras numbers don't count, and neither do values of variables, which
become the chief's.
"""

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
from typing import Any

import keras
import numpy as np

from keras_dist.environment.packages import version_of
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.internals import keras_internals
from keras_dist.internals import keras_saveables
from keras_dist.plugin.workers import Workers

# Entry by entry, in words that tell one value from another.
Fingerprint = dict[str, str]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
# Values that code refers to count if they are of these types: others tell
# workers apart on purpose, such as a rank, or whether this is the chief.
_SETTINGS = (float, str)
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
        "callbacks": ", ".join(type(each).__name__ for each in callbacks),
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


def of_layers(model: keras.Model, has_settings: bool) -> Fingerprint:
    """Describes a model's layers, and with settings their attributes.

    These are numbers and strings of users' classes. A callback may change them
    later, as on the chief only."""
    layers = list(model._flatten_layers())
    parts = [o for each in layers for o in getattr(each, "operations", ())]
    names = {
        part.name: f"#{index}" for index, part in enumerate([*layers, *parts])
    }
    found: Fingerprint = {}
    for index, layer in enumerate(layers):
        what = f"layer {index} ({type(layer).__name__})"
        found |= _of_object(what, layer, names, has_settings)
        found[f"{what}: trainable"] = str(layer.trainable)
    return found


def _of_object(
    what: str, thing: Any, names: Mapping[str, str], has_settings: bool = True
) -> Fingerprint:
    """Describes an object with a configuration, entry by entry."""
    found = {what: _class_text(type(thing))}
    for name, value in _config_of(thing, has_settings).items():
        if name not in _SKIPPED:
            found[f"{what}: {name}"] = _text(value, names)
    for name, value in vars(thing).items():
        is_users = inspect.isroutine(value) and _is_users(inspect.unwrap(value))
        if is_users and name not in _SAVES:
            found[f"{what}: {name}"] = _text(value, names)
    return found


def _config_of(thing: Any, has_settings: bool = True) -> dict[str, Any]:
    """Returns an object's configuration, and settings of a user's class."""
    config = None
    if _has_lambda(thing):
        # Its configuration would have the lambda's file and line.
        config = {
            name: value
            for name, value in vars(thing).items()
            if inspect.isfunction(value)
            or (isinstance(value, _PLAIN) and not name.startswith("_"))
        }
    else:
        # A class of the user's may have none, or a faulty one.
        with contextlib.suppress(Exception):
            # The method of the class: that of a model adds the strategy.
            config = type(thing).get_config(thing)
    config = config if isinstance(config, dict) else {}
    if has_settings and _is_users(type(thing)):
        config = {**_attributes_of(thing), **config}
    return config


def _has_lambda(thing: Any) -> bool:
    is_layer = isinstance(thing, keras.Layer)
    return any(
        inspect.isfunction(value) and value.__name__ == "<lambda>"
        for each in (thing._flatten_layers() if is_layer else [thing])
        for value in getattr(each, "__dict__", {}).values()
    )


def _attributes_of(thing: Any) -> dict[str, Any]:
    """Returns the settings that an object's own methods read."""
    read = {
        name
        for base in filter(_is_users, type(thing).__mro__)
        for method, function in vars(base).items()
        if method not in _MAKES and inspect.isfunction(function)
        for code in _codes_in(function.__code__)
        for name in code.co_names
    }
    return {
        name: value
        for name, value in _settings_of(getattr(thing, "__dict__", {})).items()
        if name in read
    }


def _settings_of(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, _SETTINGS) and not name.startswith("_")
    }


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
        "for code that only some workers run."
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
    settings = _attributes_of(value) if _is_users(type(value)) else {}
    return f"{_class_text(type(value))}({inner(settings)})"


def _function_text(value: Any, inner: Callable[[Any], str]) -> str:
    function = inspect.unwrap(getattr(value, "__func__", value))
    code = getattr(function, "__code__", None)
    if code is None or not _is_users(function):
        return f"{getattr(function, '__module__', '')}.{function.__name__}"
    cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
    known = {
        **{n: function.__globals__.get(n) for n in sorted(_globals_in(code))},
        **{name: _content(cell) for name, cell in cells},
    }
    # What it calls, and objects that it refers to, are described too.
    others = {
        name: value
        for name, value in known.items()
        if inspect.isfunction(value) and _is_users(value)
    }
    parts = (
        [function.__defaults__, function.__kwdefaults__],
        {**_settings_of(known), **others},
    )
    return f"{function.__name__} {_code_text(code)} {inner(parts)}"


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
                function = getattr(value, "__func__", value)
                code = getattr(function, "__code__", None)
                if code is not None:
                    codes.append(f"{name} {_code_text(code)}")
                elif isinstance(value, _SETTINGS) and name[:2] != "__":
                    codes.append(f"{name} {value!r}")
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

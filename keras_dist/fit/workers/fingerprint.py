"""Descriptions of what a call of `fit` or a relative computes, to compare.

Configurations are described by their entries. Code that has none, such as a
function, is described by its code, and by the plain values that it refers to.
Names that Keras numbers don't count, and neither do values of variables, which
become the chief's.
"""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_dist.environment.packages import version_of
from keras_dist.fit.workers import users_code
from keras_dist.fit.workers.agreement import Facts
from keras_dist.fit.workers.agreement import hash_of
from keras_dist.fit.workers.users_code import SAVES
from keras_dist.fit.workers.users_code import class_text
from keras_dist.fit.workers.users_code import is_users
from keras_dist.internals import keras_internals
from keras_dist.internals import keras_saveables
from keras_dist.plugin.front_end import CompiledFunction

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
# Keys of configurations that say nothing of what is computed: names are
# numbered, and initial values are the chief's.
_SKIPPED = {"name", "seed", "shared_object_id", "build_config", "iterations"}
# Objects inside of objects that are described, at most.
_DEPTH = 8


def of_process(callbacks: Sequence[Any]) -> Facts:
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


def of_compile(model: keras.Model) -> Facts:
    """Describes what a model was compiled with."""
    arguments = keras_internals.compile_arguments(model) or {}
    facts = {
        f"compile({name}=...)": _text(value, {})
        for name, value in arguments.items()
        if name not in ("self", "optimizer")
    }
    for place, optimizer in keras_saveables.all_optimizers(model).items():
        facts |= _of_object(f"optimizer `{place}`", optimizer, {})
    return facts


def stamp_of(model: keras.Model) -> list[tuple[int, bool]]:
    """Returns what tells quickly that a model has other layers than before."""
    return [(id(layer), layer.trainable) for layer in model._flatten_layers()]


def of_layers(model: keras.Layer) -> Facts:
    """Describes a model's layers."""
    layers = list(model._flatten_layers())
    parts = [o for layer in layers for o in getattr(layer, "operations", ())]
    names = {
        part.name: f"#{index}" for index, part in enumerate([*layers, *parts])
    }
    facts: Facts = {}
    for index, layer in enumerate(layers):
        what = f"layer {index} ({type(layer).__name__})"
        facts |= _of_object(what, layer, names)
        facts[f"{what}: trainable"] = str(layer.trainable)
    return facts


def variables_outside(model: keras.Model) -> list[keras.Variable]:
    """Returns variables that code for a model reads, but that it hasn't."""
    things = [keras_internals.compile_arguments(model) or {}]
    things += model._flatten_layers()
    known = {id(v) for v in keras_saveables.all_variables(model)}
    reached = users_code.reached(things).variables
    return [variable for variable in reached if id(variable) not in known]


def of_callback(callback: object) -> str:
    """Describes a callback by its class, and what was passed to it."""
    if not isinstance(callback, keras.callbacks.EarlyStopping):
        return type(callback).__name__
    passed = inspect.signature(keras.callbacks.EarlyStopping).parameters
    values = {
        name: vars(callback).get(name) for name in passed if name != "verbose"
    }
    return f"{type(callback).__name__}({_text(values, {})})"


def _of_object(what: str, thing: object, names: Mapping[str, str]) -> Facts:
    """Describes an object with a configuration, entry by entry."""
    facts = {what: class_text(type(thing))}
    for name, value in _config_of(thing).items():
        if name not in _SKIPPED:
            facts[f"{what}: {name}"] = _text(value, names)
    return facts


def _config_of(thing: Any) -> dict[str, Any]:
    """Returns an object's configuration, and its code of the user's."""
    attributes = {n: v for n, v in vars(thing).items() if n not in SAVES}
    config: Any = {}
    if not _has_lambda(thing):
        # A class of the user's may have none, or a faulty one.
        with contextlib.suppress(Exception):
            # The method of the class: that of a model adds the strategy.
            config = type(thing).get_config(thing)
    # A configuration would have the lambda's file and line. The layers of a
    # model are described one by one.
    elif not isinstance(thing, keras.Model):
        config = {
            name: value
            for name, value in attributes.items()
            if isinstance(value, (*_PLAIN, dict, list, tuple))
            and not name.startswith("_")
        }
    config = config if isinstance(config, dict) else {}
    if is_users(type(thing)):
        config = {**users_code.read_by_class(thing), **config}
    code = {n: v for n, v in attributes.items() if users_code.is_users_code(v)}
    return {**config, **code}


def _has_lambda(thing: Any) -> bool:
    is_layer = isinstance(thing, keras.Layer)
    return any(
        inspect.isfunction(value)
        and value.__name__ == "<lambda>"
        and name not in SAVES
        for part in (thing._flatten_layers() if is_layer else [thing])
        for name, value in getattr(part, "__dict__", {}).items()
    )


def of_step(fn: Callable[..., Any]) -> Facts:
    """Describes a function, and the objects of Keras that it uses."""
    if isinstance(fn, CompiledFunction):
        fn = fn.python_function
    reached = users_code.reached(fn)
    facts: Facts = {}
    for code in reached.codes:
        what = f"code of `{code.co_qualname}`"
        facts[what] = facts.get(what, "") + users_code.code_text(code)
    for name, thing in reached.objects.items():
        if isinstance(thing, keras.Layer):
            facts |= {f"`{name}`, {k}": v for k, v in of_layers(thing).items()}
        else:
            facts |= _of_object(f"`{name}`", thing, {})
    return facts


def _text(value: object, names: Mapping[str, str], depth: int = _DEPTH) -> str:
    """Describes any value; `names` stand for those of layers."""
    if isinstance(value, str):
        return repr(names.get(value, value))
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, np.generic):
        return repr(value.item())
    if isinstance(value, type):
        return class_text(value)
    if isinstance(value, keras.Variable) or depth == 0:
        return type(value).__name__

    def inner(value: object) -> str:
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
        return f"{array.dtype}{list(array.shape)} {hash_of(array.tobytes())}"
    if isinstance(value, functools.partial):
        return f"partial {inner((value.func, value.args, value.keywords))}"
    if inspect.isroutine(value):
        return _function_text(value, inner)
    if hasattr(value, "get_config"):
        return f"{class_text(type(value))}({inner(_config_of(value))})"
    settings = users_code.read_by_class(value) if is_users(type(value)) else {}
    return f"{class_text(type(value))}({inner(settings)})"


def _function_text(value: Any, inner: Callable[[Any], str]) -> str:
    function = inspect.unwrap(getattr(value, "__func__", value))
    code = getattr(function, "__code__", None)
    if code is None or not is_users(function):
        return f"{getattr(function, '__module__', '')}.{function.__name__}"
    known = users_code.outer_values(function)
    settings = users_code.settings_in(known, [*users_code.codes_in(code)])
    parts = (
        [function.__defaults__, function.__kwdefaults__],
        {**settings, **users_code.functions_in(known)},
    )
    return f"{function.__name__} {users_code.code_text(code)} {inner(parts)}"

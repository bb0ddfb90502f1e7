"""Looks private names of Keras and of frameworks up; says which one is gone."""

import importlib
from types import ModuleType
from typing import Any

from keras_dist.environment import versions

_GONE = object()


def private(*places: str) -> Any:
    """Returns the object that is in the first of these places that exists.

    Args:
        places: Strings, the object's dotted name in each version in which it
            is elsewhere, such as `"keras.src.backend.jax.core"`.

    Raises:
        UnsupportedKerasError: If it is in none of them, for Keras.
        UnsupportedBackendError: The same for another package.
        ModuleNotFoundError: If the package is not installed.
    """
    for place in places:
        target = _look_up(place)
        if target is not _GONE:
            return target
    package = places[0].partition(".")[0]
    version = getattr(importlib.import_module(package), "__version__", "?")
    raise versions.unsupported(package)(
        f"keras_dist uses a private name that this version of '{package}' "
        f"does not have: {' or '.join(places)}. Received: {package} {version}. "
        f"{versions.expectation(package)}"
    )


def _look_up(place: str) -> Any:
    path, *names = place.split(".")
    target: Any = importlib.import_module(path)
    for name in names:
        path = f"{path}.{name}"
        owner, target = target, getattr(target, name, _GONE)
        if target is _GONE and isinstance(owner, ModuleType):
            target = _module(path)
        if target is _GONE:
            break
    return target


def _module(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise  # it is there, and needs something that is not
        return _GONE

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
        found = _look_up(place)
        if found is not _GONE:
            return found
    package = places[0].partition(".")[0]
    version = getattr(importlib.import_module(package), "__version__", "?")
    raise versions.unsupported(package)(
        f"keras_dist uses a private name that this version of '{package}' "
        f"does not have: {' or '.join(places)}. Received: {package} {version}. "
        f"{versions.expectation(package)}"
    )


def _look_up(place: str) -> Any:
    path, *names = place.split(".")
    found: Any = importlib.import_module(path)
    for name in names:
        path = f"{path}.{name}"
        owner, found = found, getattr(found, name, _GONE)
        if found is _GONE and isinstance(owner, ModuleType):
            found = _module(path)
        if found is _GONE:
            break
    return found


def _module(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise  # it is there, and needs something that is not
        return _GONE

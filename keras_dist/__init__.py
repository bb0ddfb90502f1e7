"""The programming model of tf.distribute for Keras 3, on every backend.

A strategy says which devices compute, and where variables are stored. A model
that is made inside of `strategy.scope()` trains with `fit`, or in a loop of
your own with `strategy.run`.

`import keras_dist` loads neither Keras nor a framework, so it may precede the
choice of a backend. A name loads what it needs on its first use.
"""

# `__init__.pyi` lists the public names and the modules that they come from.

import importlib
import os
import sys
from typing import Any

import lazy_loader

from keras_dist.environment import keras_import
from keras_dist.errors import BackendNotFoundError as _BackendNotFoundError

__version__ = "0.2.0"
_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """Loads a public name."""
    try:
        return _load(name)
    except _BackendNotFoundError as error:
        # Without the many frames of modules that import each other.
        raise error.with_traceback(None) from None


def __reduce_ex__(protocol: object) -> tuple[Any, ...]:
    """Pickles the module by its name, with a function that uses it."""
    return importlib.import_module, (__name__,)


def _default_strategy() -> Any:
    from keras_dist.strategies.default import default_strategy

    return default_strategy()


def _hooks() -> Any:
    from keras_dist.fit.hooks import table

    return table()


def _imported_versions() -> dict[str, str]:
    """Returns the versions of Keras and of its backend's framework."""
    keras = sys.modules["keras"]
    name = keras.backend.backend()
    # Not each backend of Keras has a framework, with a version.
    versions = {
        package: getattr(sys.modules.get(package), "__version__", "")
        for package in ("keras", name)
    }
    return {
        package: version for package, version in versions.items() if version
    }


def _set_up() -> None:
    """Prepares what must be there before any name is used.

    Checks versions, makes virtual devices, registers what lower layers ask of
    higher ones, and watches workers that would train alone.
    """
    from keras_dist.environment import versions

    versions.check(_imported_versions())
    if os.environ.get("KERAS_DIST_VIRTUAL_DEVICES"):
        from keras_dist.plugin.backend import apply_environment

        apply_environment()
    from keras_dist.cluster_resolver.detection import place
    from keras_dist.core import context
    from keras_dist.plugin import front_end

    context.register_default(_default_strategy)
    front_end.register_hooks(_hooks)
    detected = place()
    # Elsewhere, `fit` is imported when it is needed.
    if detected is not None and detected[0].number > 1:
        from keras_dist.fit.hooks import watch_training

        watch_training()


keras_import.when_imported(_set_up)

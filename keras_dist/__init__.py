"""The programming model of tf.distribute for Keras 3, on every backend.

`__init__.pyi` lists the public names and the modules that they come from. A
name is loaded on its first use, so that `import keras_dist` loads neither
Keras nor a framework: the command line picks a backend after it.
"""

import os
from typing import Any

import lazy_loader

from keras_dist.environment import keras_import
from keras_dist.errors import BackendNotFoundError as _BackendNotFoundError

__version__ = "0.1.0"
_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """Loads a public name."""
    try:
        return _load(name)
    except _BackendNotFoundError as error:
        # Without the many frames of modules that import each other.
        raise error.with_traceback(None) from None


def _set_up() -> None:
    """Makes virtual devices, and watches workers that would train alone."""
    if os.environ.get("KERAS_DIST_VIRTUAL_DEVICES"):
        from keras_dist.plugin.backend import apply_environment

        apply_environment()
    from keras_dist.fit.alone import watch_training

    watch_training()


keras_import.when_imported(_set_up)

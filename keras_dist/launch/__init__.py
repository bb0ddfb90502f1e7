"""`keras_dist.launch(fn)`, and the parts of commands that use Keras.

This package is also a function: `keras_dist.launch(fn, args, workers=2)` calls
`fn` on several workers of this machine. Its arguments and results are those of
`keras_dist.launch.function.launch`. `python -m keras_dist.launch` is the
command `keras-dist run`.

Example:

>>> def name():
...     import os
...     return os.environ["KERAS_DIST_WORKER_INDEX"]
>>> keras_dist.launch(name, workers=2)
['0', '1']
"""

import sys
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from keras_dist.launch.function import launch

__all__ = ["launch"]


class _CallableModule(ModuleType):
    """A module that can be called like its function `launch`."""

    def __call__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        workers: int = 2,
        devices: int | None = None,
        backend: str | None = None,
        timeout: float | None = None,
        start_method: str = "spawn",
    ) -> list[Any]:
        return launch(
            fn, args, kwargs, workers, devices, backend, timeout, start_method
        )


sys.modules[__name__].__class__ = _CallableModule

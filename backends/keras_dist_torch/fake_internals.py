"""The door to private names for a step that computes no values.

| name | why |
|---|---|
| `FakeTensorMode` | tensors have shapes, dtypes and sizes, and no memory |
| `unset_fake_temporarily` | a mesh of devices reads its numbers |
| `FakeStore` | registers the process group of one rank without the others |
| `TorchDispatchMode` | sees each operation, with its results |
| `UntypedStorage._cdata` | tells one storage from another |
| `torch_seed_generator`, `cond` | Keras reads a seed, and a condition |
| the log of fake tensors | it has failures that Keras expects |

If one of them moves, `private` raises an error with its name.
"""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import torch

from keras_dist.core.context import replaced
from keras_dist.internals.hooks import Hook
from keras_dist.internals.hooks import Hooks
from keras_dist.internals.private_names import private

_FAKE = "torch._subclasses.fake_tensor"
_FakeTensorMode = private(f"{_FAKE}.FakeTensorMode")
with_values = private(f"{_FAKE}.unset_fake_temporarily")
FakeStore = private("torch.testing._internal.distributed.fake_pg.FakeStore")
DispatchMode = private("torch.utils._python_dispatch.TorchDispatchMode")
_random = private("keras.src.backend.torch.random")
_core = private("keras.src.backend.torch.core")
private("keras.src.backend.torch.random.torch_seed_generator")
private("keras.src.backend.torch.core.cond")
private("torch.UntypedStorage._cdata")


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Gives tensors and variables that are made inside no memory.

    Of a condition, such as that of Keras' loss scaling, the first branch runs.
    """
    fake = _FakeTensorMode(allow_non_fake_inputs=True)
    with _hooks, replaced(_now, is_fake=True), fake:
        yield


class _Faking(threading.local):
    def __init__(self) -> None:
        self.is_fake = False


_now = _Faking()


def _instead(fake: Callable[..., Any]) -> Callable[[Any], Any]:
    """Makes a hook of what a thread does that computes no values."""

    def hook(original: Any) -> Any:
        @functools.wraps(original)
        def either(*args: Any, **kwargs: Any) -> Any:
            return (fake if _now.is_fake else original)(*args, **kwargs)

        return either

    return hook


def _table() -> Iterator[Hook]:
    why = "what has no values asks for none"
    make = _instead(_initialize)
    yield Hook(keras.Variable, "_initialize_with_initializer", make, why)
    make = _instead(lambda seed: torch.Generator())
    yield Hook(_random, "torch_seed_generator", make, why)
    make = _instead(lambda pred, true_fn, false_fn: true_fn())
    yield Hook(_core, "cond", make, why)
    why = "failures that Keras expects are not told of"
    make = _instead(lambda record: False)
    yield Hook(logging.getLogger(_FAKE), "filter", make, why)


_hooks = Hooks(_table)


def _initialize(self: Any, initializer: Any) -> None:
    self._initialize(keras.ops.empty(self._shape, self._dtype))


def key_of(storage: torch.UntypedStorage) -> int:
    """Returns a number that no other living storage has."""
    return int(storage._cdata)

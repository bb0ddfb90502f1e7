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
import logging
from collections.abc import Iterator
from typing import Any

import keras
import torch

from keras_dist.core.context import replaced
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
    with (
        replaced(keras.Variable, _initialize_with_initializer=_initialize),
        replaced(_random, torch_seed_generator=lambda seed: torch.Generator()),
        replaced(_core, cond=lambda pred, true_fn, false_fn: true_fn()),
        replaced(logging.getLogger(_FAKE), disabled=True),
        _FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


def _initialize(self: Any, initializer: Any) -> None:
    self._initialize(keras.ops.empty(self._shape, self._dtype))


def key_of(storage: torch.UntypedStorage) -> int:
    """Returns a number that no other living storage has."""
    return int(storage._cdata)

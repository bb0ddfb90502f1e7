"""Counts the collectives of operations, and the bytes of their tensors."""

import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any
from typing import Self

import torch
from torch.distributed.tensor import DTensor

from keras_dist.internals.hooks import Hook
from keras_dist.internals.hooks import Hooks
from keras_dist.internals.hooks import as_hook
from keras_dist.plugin.targets import Collective
from keras_dist_torch.fake_internals import DispatchMode
from keras_dist_torch.fake_internals import key_of
from keras_dist_torch.torch_internals import pytree

_LIBRARIES = ("c10d", "_c10d_functional")
# How often the bytes of the whole value go around a ring of devices.
_ROUNDS = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}


class Collectives:
    """Collectives of one device of many, by kind."""

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def add(self, kind: str, num_bytes: int) -> None:
        self._counts[kind] += 1
        self._bytes[kind] += num_bytes

    def found(self) -> tuple[Collective, ...]:
        others = self.devices - 1
        return tuple(
            Collective(
                kind,
                self.devices,
                count,
                self._bytes[kind],
                _ROUNDS[kind] * self._bytes[kind] * others // self.devices,
            )
            for kind, count in self._counts.items()
        )


class _Measuring(threading.local):
    def __init__(self) -> None:
        self.by: Measured | None = None


_measuring = _Measuring()


@as_hook
def _hook_resize(original: Any, self: torch.UntypedStorage, size: int) -> Any:
    result = original(self, size)
    if _measuring.by is not None:
        _measuring.by.resized(self)
    return result


def _table() -> Iterator[Hook]:
    why = "memory counts as free of tensors that FSDP keeps without it"
    yield Hook(torch.UntypedStorage, "resize_", _hook_resize, why)


_hooks = Hooks(_table)


class Measured(DispatchMode):
    """Sees operations inside: `peak` has the bytes at the fullest moment."""

    def __init__(
        self, collectives: Collectives, tensors: Iterable[torch.Tensor]
    ) -> None:
        super().__init__()
        self._collectives = collectives
        self._sizes: dict[int, int] = {}
        self._now = self.peak = 0
        for tensor in tensors:
            self._see(tensor)

    def __enter__(self) -> Self:
        _hooks.__enter__()
        self._before, _measuring.by = _measuring.by, self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _measuring.by = self._before
        _hooks.__exit__()

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Notes the new size of the memory of a tensor that it has seen."""
        if key_of(storage) in self._sizes:
            self._set(key_of(storage), storage.nbytes())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its parts are seen next
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        if func.namespace in _LIBRARIES:
            self._note(func.__name__, (args, kwargs, result))
        return result

    def _note(self, name: str, values: Any) -> None:
        tensors = [
            leaf
            for leaf in pytree.tree_leaves(values)
            if isinstance(leaf, torch.Tensor)
        ]
        for kind in _ROUNDS:
            if kind.replace("-", "") in name.replace("_", ""):
                self._collectives.add(kind, max(t.nbytes for t in tensors))

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = key_of(storage)
        if key not in self._sizes:
            self._set(key, storage.nbytes())
            weakref.finalize(storage, self._forget, key)

    def _set(self, key: int, size: int) -> None:
        self._now += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self._now)

    def _forget(self, key: int) -> None:
        self._now -= self._sizes.pop(key)

"""Counts the collectives of operations, and the bytes of their tensors."""

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any
from typing import Self

import torch
from torch.distributed.tensor import DTensor

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
        self._resize = original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            if key_of(storage) in self._sizes:
                self._set(key_of(storage), storage.nbytes())
            return result

        # FSDP frees the memory of tensors that it keeps.
        torch.UntypedStorage.resize_ = resize_
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

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

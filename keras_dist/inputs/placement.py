"""Placement: puts the parts of a step on the replicas' devices."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_dist.core.device import Device
from keras_dist.core.nests import always
from keras_dist.core.nests import map_nest
from keras_dist.core.nests import regroup
from keras_dist.core.options import InputOptions
from keras_dist.core.rows import describe
from keras_dist.core.rows import named_leaves
from keras_dist.inputs.sources.source import dtype_name
from keras_dist.inputs.sources.source import like
from keras_dist.inputs.sources.source import own_memory
from keras_dist.plugin.executor import Executor

HOST = Device("cpu", 0)


class BatchPlacement:
    """A callable that puts each replica's part on the device of the options."""

    def __init__(self, executor: Executor, options: InputOptions) -> None:
        self._executor = executor
        is_on_devices = (
            options.experimental_fetch_to_device
            or options.experimental_place_dataset_on_device
        )
        devices = executor.plan.devices
        self._devices = devices if is_on_devices else (HOST,) * len(devices)

    def __call__(self, parts: Sequence[Any]) -> Any:
        """Joins the replicas' nests to a nest of `PerReplica` values.

        With one replica, the result is a nest of tensors. Raises `ValueError`,
        which names the leaf, if the backend can't hold an array.
        """
        placed = [
            self._part(part, device)
            for part, device in zip(parts, self._devices, strict=True)
        ]
        return regroup(placed, self._per_replica, always=always)

    def spec(self, part_spec: Any) -> Any:
        """Returns the spec of placed elements, from that of one part."""
        specs = [map_nest(self._delivered, part_spec)] * len(self._devices)
        return regroup(specs, self._per_replica, always=always)

    def _part(self, part: Any, device: Device) -> Any:
        def put(leaf: Any) -> Any:
            if leaf is None:
                return None
            # A copy, because data may reuse the array's memory while steps
            # are read ahead.
            try:
                return self._executor.put(own_memory(leaf), device)
            except (TypeError, ValueError) as error:
                where = next(p for p, x in named_leaves(part) if x is leaf)
                raise ValueError(
                    f"Data can't be put on device '{device}'. Received: "
                    f"{describe(where, leaf)}. Expected: a dtype that the "
                    f"backend '{keras.backend.backend()}' has."
                ) from error

        return map_nest(put, part)

    def _delivered(self, leaf: Any) -> Any:
        if not isinstance(leaf, keras.KerasTensor):
            return leaf
        return like(leaf, leaf.shape, self._dtype(leaf.dtype))

    def _dtype(self, name: str) -> str:
        """Returns the backend's dtype for one; not all have 64 bits."""
        try:
            sample = np.zeros((0,), name)
        except TypeError:
            return name  # such as string, which is no NumPy dtype
        return dtype_name(self._executor.put(sample, HOST).dtype)

    def _per_replica(self, parts: Sequence[Any]) -> Any:
        if all(part is None for part in parts):
            return None
        return self._executor.per_replica(parts)

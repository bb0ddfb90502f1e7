"""Owners: the devices of variables that have a single copy."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_dist.core.device import Device

# The attribute of a variable with its device.
_ATTRIBUTE = "_keras_dist_owner"


class Owners:
    """The device of each single-copy variable, balanced by bytes.

    A variable goes to the first device among those with the fewest bytes, so
    that the same program places it alike each time. A variable that is created
    for another one, such as an optimizer's slot, goes to the same device.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._num_bytes = dict.fromkeys(devices, 0)

    def of(self, variable: keras.Variable) -> Device:
        """Returns a variable's device; the first one until it has a shape."""
        attributes: dict[str, Any] = vars(variable)
        device: Device | None = attributes.get(_ATTRIBUTE)
        if device in self._num_bytes:
            return device
        first = next(iter(self._num_bytes))
        has_shape = None not in _shape(variable)
        if len(self._num_bytes) == 1 or not has_shape:
            return first
        device = min(self._num_bytes, key=lambda d: self._num_bytes[d])
        return self._give(variable, device)

    def _give(self, variable: keras.Variable, device: Device) -> Device:
        vars(variable)[_ATTRIBUTE] = device
        self._num_bytes[device] += num_bytes(variable)
        return device

    def keep_together(
        self, variable: keras.Variable, reference: keras.Variable
    ) -> None:
        """Gives a new variable the device of a reference variable."""
        self._give(variable, self.of(reference))


def num_bytes(variable: keras.Variable) -> int:
    """Returns the size of a variable's value in bytes."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    bits = 16 if dtype == "bfloat16" else 8 * np.dtype(dtype).itemsize
    return int(np.prod(_shape(variable), dtype=np.int64)) * bits // 8


def _shape(variable: keras.Variable) -> tuple[Any, ...]:
    shape = variable.shape
    return (None,) if shape is None else tuple(shape)

"""Owners: which device keeps a variable that has one copy only."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_dist.core.device import Device

# Set on a variable, with the device that keeps it.
_ATTRIBUTE = "_keras_dist_owner"


class Owners:
    """Spreads variables over devices, so that each keeps as many bytes.

    A variable goes to the device that has the fewest bytes by then, the first
    of those; the same program puts it in the same place each time. What is
    made for another variable, as an optimizer's slots are, goes with it.

    Args:
        devices: Sequence of `Device`s.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._num_bytes = dict.fromkeys(devices, 0)

    def of(self, variable: keras.Variable) -> Device:
        """The device that keeps a variable; the first until it has a shape.

        Args:
            variable: A `keras.Variable`.
        """
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
        """Puts a variable where another one is.

        Args:
            variable: A `keras.Variable`, new.
            reference: A `keras.Variable`.
        """
        self._give(variable, self.of(reference))


def num_bytes(variable: keras.Variable) -> int:
    """The size of a variable's value, in bytes."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    bits = 16 if dtype == "bfloat16" else 8 * np.dtype(dtype).itemsize
    return int(np.prod(_shape(variable), dtype=np.int64)) * bits // 8


def _shape(variable: keras.Variable) -> tuple[Any, ...]:
    shape = variable.shape
    return (None,) if shape is None else tuple(shape)

"""Divides a variable into as many equal parts as there are replicas."""

import math
from typing import Any

from keras import ops


class Parts:
    """The division of a flattened, zero-padded tensor into equal parts."""

    def __init__(self, shape: tuple[int, ...], num_parts: int) -> None:
        self.shape = tuple(shape)
        self.num_parts = num_parts
        self.num_elements = math.prod(self.shape)
        self.size = -(-self.num_elements // num_parts)

    def split(self, tensor: Any) -> Any:
        """Divides a tensor of `shape` into one of shape `(num_parts, size)`."""
        flat = ops.reshape(tensor, (-1,))
        padding = self.num_parts * self.size - self.num_elements
        if padding:
            flat = ops.pad(flat, [(0, padding)])
        return ops.reshape(flat, (self.num_parts, self.size))

    def join(self, tensor: Any) -> Any:
        """Joins a tensor of shape `(num_parts, size)` into one of `shape`."""
        flat = ops.reshape(tensor, (-1,))
        return ops.reshape(flat[: self.num_elements], self.shape)

"""Divides a variable into as many equal parts as there are replicas."""

import math
from typing import Any

from keras import ops


class Parts:
    """The division of a tensor of one shape into equal parts.

    The tensor is flattened and padded with zeros, so that all parts have one
    size.

    Args:
        shape: Tuple of integers.
        num_parts: Integer from 1.

    Attributes:
        num_parts: Integer, as given.
        size: Integer, elements of each part; 0 for an empty tensor.

    Example:

    >>> from keras_dist.sharding.parts import Parts
    >>> parts = Parts((3,), num_parts=2)
    >>> cut = parts.split(keras.ops.array([1.0, 2.0, 3.0]))
    >>> keras.ops.convert_to_numpy(cut).tolist()
    [[1.0, 2.0], [3.0, 0.0]]
    >>> keras.ops.convert_to_numpy(parts.join(cut)).tolist()
    [1.0, 2.0, 3.0]
    """

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

"""Tensors as bytes, for exchanges of workers."""

import math
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import numpy as np


class Body(NamedTuple):
    """Bytes that are read only if they are few."""

    size: int
    read: Callable[[], bytes]


NO_BODY = Body(0, bytes)


class Like(NamedTuple):
    """The dtype and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> "Like":
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        if dtype == "string":
            raise TypeError(
                "Only numbers and booleans can be sent between workers. "
                "Received: a tensor of strings. Encode it as numbers, for "
                "instance with `keras.layers.StringLookup`."
            )
        return cls(dtype, tuple(tensor.shape))

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def nbytes(self) -> int:
        """Number of bytes of the values."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def rows(self) -> int:
        """The size along axis 0; -1 without axes."""
        return self.shape[0] if self.shape else -1

    @property
    def of_any_rows(self) -> str:
        """Describes tensors that may differ along axis 0."""
        if not self.shape:
            return str(self)
        sizes = ", ".join(["rows", *map(str, self.shape[1:])])
        return f"{self.dtype}[{sizes}]"


def values_of(
    data: bytes,
    likes: Sequence[Like],
    rows: Sequence[int] | None = None,
) -> list[np.ndarray]:
    """Returns the arrays in bytes; `rows` has their sizes along axis 0."""
    values, start = [], 0
    for index, like in enumerate(likes):
        shape = like.shape
        if rows is not None and shape:
            shape = (rows[index], *shape[1:])
        dtype = np.dtype(like.dtype)
        array = np.frombuffer(data, dtype, math.prod(shape), start)
        values.append(array.reshape(shape))
        start += array.nbytes
    return values

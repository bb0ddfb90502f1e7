"""Distributed values: values with a component on each replica."""

from abc import ABC
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from keras_dist.core import value_operators


class DistributedValues(ABC):
    """A value with one component for each local replica.

    Variables that are created under a strategy are distributed values too. On
    TensorFlow, native `tf.distribute.DistributedValues` are instances of this
    class.

    Example:

    >>> issubclass(keras_dist.PerReplica, keras_dist.DistributedValues)
    True
    """

    @property
    @abstractmethod
    def values(self) -> tuple[Any, ...]:
        """The components, in replica order."""


class _Components(DistributedValues):
    """A distributed value that holds its components, unlike a variable."""

    _name: str

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = tuple(values)

    @property
    def values(self) -> tuple[Any, ...]:
        return self._values

    def __repr__(self) -> str:
        return framed(self._name, [repr(v) for v in self.values])

    def __str__(self) -> str:
        return framed(self._name, [str(v) for v in self.values])


class PerReplica(_Components):
    """A value whose components may differ, such as a distributed batch.

    Args:
        values: Sequence with a component for each local replica, any objects.

    Example:

    >>> keras_dist.PerReplica([1.5, 2.5])
    PerReplica:{
      0: 1.5,
      1: 2.5
    }
    """

    _name = "PerReplica"


class Mirrored(_Components):
    """A value whose components are equal, such as a result of `reduce_to`.

    Args:
        values: Sequence with a component for each local replica.

    Example:

    >>> keras_dist.Mirrored([1.5, 1.5]).values
    (1.5, 1.5)
    """

    _name = "Mirrored"


value_operators.install(PerReplica, "PerReplica")
value_operators.install(Mirrored, "Mirrored")


def framed(name: str, components: Sequence[str]) -> str:
    """Formats a distributed value, one line for each component's index."""
    lines = ",\n".join(f"  {i}: {c}" for i, c in enumerate(components))
    return f"{name}:{{\n{lines}\n}}"

"""Source: a common interface to all kinds of users' data."""

import itertools
from abc import ABC
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import keras

from keras_dist.core.nests import leaves_of
from keras_dist.core.nests import map_nest
from keras_dist.core.rows import readable
from keras_dist.core.rows import shape_of
from keras_dist.inputs.adapters import RepeatableBatches

INFINITE = -1
UNKNOWN = -2


class Source(ABC):
    """Data that is read in passes, one element after another.

    An element is a nest of NumPy arrays and tensors of the framework.

    Attributes:
        restarts: Boolean, true if each pass starts anew. If false, a pass
            continues where the previous one stopped.
    """

    restarts = True

    def __init__(self) -> None:
        self._begun: Iterator[Any] | None = None
        self._seen: Any = None

    @abstractmethod
    def open(self) -> Iterator[Any]:
        """Begins a pass; yields the user's elements unchanged."""

    @property
    def cardinality(self) -> int:
        """Number of elements, `INFINITE` or `UNKNOWN`."""
        return UNKNOWN

    @property
    def spec(self) -> Any:
        """Nest like an element, of `keras.KerasTensor`s.

        Raises `ValueError` if there is no element to derive it from.
        """
        spec = self.known_spec()
        if spec is None:
            raise ValueError(
                "The `element_spec` of data without elements is not known. "
                f"Received: no element from a {type(self).__name__}."
            )
        return spec

    @property
    def has_static_rows(self) -> bool:
        """True if all elements are known to have one number of rows."""
        leaves = leaves_of(self.known_spec())
        return all(None not in shape_of(leaf)[:1] for leaf in leaves)

    def check_batched(self) -> None:
        """Raises `ValueError` if the data's own spec has scalars only."""

    def known_spec(self) -> Any:
        """Returns the spec, or `None` if there is no element to derive it from.

        A source without a spec of its own reads the first element, which the
        next pass delivers.
        """
        if self._seen is None:
            begun = self.read()
            first = list(itertools.islice(begun, 1))
            self._begun = itertools.chain(first, begun)
        return self._seen

    def read(self) -> Iterator[Any]:
        """Begins a pass; yields elements with `readable` leaves."""
        begun, self._begun = self._begun, None
        return self._elements() if begun is None else begun

    def peek(self) -> list[Any]:
        """Returns a list of the first element of a pass, or an empty list.

        Data that can be read only once loses the element.
        """
        return list(itertools.islice(self._elements(), 1))

    def _elements(self) -> Iterator[Any]:
        for element in self.open():
            leaves = map_nest(readable, element)
            if self._seen is None:
                self._seen = map_nest(_spec_of, leaves)
            yield leaves

    def trace(self) -> Any:
        """Returns the data to iterate over in a `tf.function`, or `None`."""
        return None

    def keras_data(self) -> Any:
        """Returns the same batches in a form for `fit`."""
        return RepeatableBatches(self.read, self.cardinality)


def _spec_of(leaf: Any) -> Any:
    if leaf is None:
        return None
    shape = shape_of(leaf)
    dtype = dtype_name(getattr(leaf, "dtype", type(leaf)))
    return keras.KerasTensor((None, *shape[1:]) if shape else (), dtype)


def dtype_name(dtype: Any) -> str:
    """Returns Keras' name of a dtype of any framework."""
    kind = getattr(dtype, "kind", "")
    if isinstance(kind, str) and kind in "OSU" and kind:
        return "string"
    name: str = keras.backend.standardize_dtype(dtype)
    return name

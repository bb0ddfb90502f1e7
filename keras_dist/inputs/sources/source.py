"""Source: a common interface to all kinds of users' data."""

import itertools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_dist.core.nests import leaves_of
from keras_dist.core.nests import map_nest
from keras_dist.core.rows import readable
from keras_dist.core.rows import shape_of
from keras_dist.internals import keras_data

INFINITE = -1
UNKNOWN = -2


class Source:
    """Data that is read in passes, one nest of arrays after another.

    Attributes:
        restarts: Boolean, false if a pass continues where the last one stopped.
        is_for_keras: Boolean, true if `fit` reads the data as it is.
    """

    restarts = True
    is_for_keras = False

    def __init__(self, data: Any) -> None:
        self._data = data
        self._begun: Iterator[Any] | None = None
        self._seen: Any = None

    def open(self) -> Iterator[Any]:
        """Begins a pass; yields the user's elements unchanged."""
        return iter(self._data)

    @property
    def cardinality(self) -> int:
        """Number of elements, `INFINITE` or `UNKNOWN`."""
        return UNKNOWN

    @property
    def spec(self) -> Any:
        """Nest like an element, of `keras.KerasTensor`s."""
        spec = self.known_spec()
        if spec is None:
            raise ValueError(
                "The `element_spec` is not known, because the data has no "
                f"elements. Received: an empty {type(self).__name__}."
            )
        return spec

    @property
    def has_static_rows(self) -> bool:
        """True if all elements are known to have one number of rows."""
        leaves = leaves_of(self.known_spec())
        return all(None not in shape_of(leaf)[:1] for leaf in leaves)

    @property
    def rows(self) -> int:
        """The rows of each element; 0 if that is not known without reading."""
        return 0

    def check_batched(self) -> None:
        """Raises `ValueError` if the data's own spec has scalars only."""

    def known_spec(self) -> Any:
        """Returns the spec, if need be of the first element, or `None`."""
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
        """Returns a list of the first element of a pass, or an empty list."""
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
        if self.is_for_keras:
            return self._data
        return adapter_of(self.read, self.restarts, self.cardinality)


def rows_of_spec(spec: object) -> int:
    """Returns the rows of all elements with a spec; 0 if they are unknown."""
    sizes = {(*shape_of(leaf)[:1], None)[0] for leaf in leaves_of(spec)}
    return (sizes.pop() or 0) if len(sizes) == 1 else 0


def _spec_of(leaf: object) -> Any:
    if leaf is None:
        return None
    shape = shape_of(leaf)
    dtype = dtype_name(getattr(leaf, "dtype", type(leaf)))
    return keras.KerasTensor((None, *shape[1:]) if shape else (), dtype)


def like(leaf: Any, shape: Any, dtype: str | None = None) -> Any:
    return keras.KerasTensor(
        shape, dtype or leaf.dtype, sparse=leaf.sparse, ragged=leaf.ragged
    )


def own_memory(leaf: object) -> Any:
    """Copies a NumPy array, which whoever gave it may overwrite."""
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def dtype_name(dtype: object) -> str:
    kind = getattr(dtype, "kind", "")
    if isinstance(kind, str) and kind in "OSU" and kind:
        return "string"
    name: str = keras.backend.standardize_dtype(dtype)
    return name


class RepeatableBatches(keras_data.GeneratorDataAdapter):
    """An adapter for batches that each epoch reads anew."""

    def __init__(
        self, read: Callable[[], Iterator[Any]], cardinality: int
    ) -> None:
        self._read = read
        self._cardinality = cardinality
        # The batches after those that the base class reads in advance.
        self._rest: Iterator[Any] | None = _tuples(read())
        super().__init__(self._rest)
        self.generator: Callable[[], Iterator[Any]] = self._next_pass

    def _next_pass(self) -> Iterator[Any]:
        if self._rest is None:
            return _tuples(self._read())
        return itertools.chain(self._first_batches, self._others())

    def _others(self) -> Iterator[Any]:
        # Keras may read one batch, build the model, and begin again.
        rest, self._rest = self._rest, None
        if rest is None:
            num_first = len(self._first_batches)
            rest = itertools.islice(_tuples(self._read()), num_first, None)
        yield from rest

    @property
    def num_batches(self) -> int | None:
        return self._cardinality if self._cardinality >= 0 else None


def adapter_of(
    read: Callable[[], Iterator[Any]], restarts: bool, cardinality: int
) -> Any:
    """Returns Keras' adapter of batches, of which `read` begins a pass."""
    if restarts:
        return RepeatableBatches(read, cardinality)
    return keras_data.GeneratorDataAdapter(_tuples(read()))


def _tuples(batches: Iterator[Any]) -> Iterator[tuple[Any, ...]]:
    # Keras accepts only tuples from a generator.
    for batch in batches:
        if isinstance(batch, (tuple, list)):
            yield tuple(batch)
        else:
            yield (batch,)

"""Adapters: wrap global batches for Keras' `fit`."""

import itertools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import final

from keras_dist.internals import keras_internals


@final
class RepeatableBatches(keras_internals.GeneratorDataAdapter):
    """An adapter for batches that each epoch reads anew.

    `read` begins a pass; a negative `cardinality` means that the number of
    batches is unknown.
    """

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


def one_shot_batches(batches: Iterator[Any]) -> Any:
    """Returns an adapter for batches that can be read once."""
    return keras_internals.GeneratorDataAdapter(_tuples(batches))


def _tuples(batches: Iterator[Any]) -> Iterator[tuple[Any, ...]]:
    # Keras accepts only tuples from a generator.
    for batch in batches:
        if isinstance(batch, (tuple, list)):
            yield tuple(batch)
        else:
            yield (batch,)

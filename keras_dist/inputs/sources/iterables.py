"""Iterables, functions that return one, and iterators, such as generators."""

import itertools
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sized
from typing import Any
from typing import final

from keras_dist.inputs.adapters import one_shot_batches
from keras_dist.inputs.sources.source import UNKNOWN
from keras_dist.inputs.sources.source import Source


@final
class IterableSource(Source):
    """Anything that can be iterated over again, such as a list.

    Args:
        iterable: The iterable.
    """

    def __init__(self, iterable: Iterable[Any]) -> None:
        super().__init__()
        self._iterable = iterable

    def open(self) -> Iterator[Any]:
        return iter(self._iterable)

    @property
    def cardinality(self) -> int:
        if isinstance(self._iterable, Sized):
            return len(self._iterable)
        return UNKNOWN


@final
class FunctionSource(Source):
    """A function without arguments, called for each pass.

    Args:
        fn: Callable that returns an iterable.
    """

    def __init__(self, fn: Callable[[], Iterable[Any]]) -> None:
        super().__init__()
        self._fn = fn

    def open(self) -> Iterator[Any]:
        return iter(self._fn())


@final
class OneShotSource(Source):
    """An iterator, which can be read once only.

    Args:
        iterator: The iterator, such as a generator.
    """

    restarts = False

    def __init__(self, iterator: Iterator[Any]) -> None:
        super().__init__()
        self._iterator = iterator

    def open(self) -> Iterator[Any]:
        # The chain keeps a generator open that is the user's to close.
        return itertools.chain(self._iterator)

    def keras_data(self) -> Any:
        return one_shot_batches(self.read())

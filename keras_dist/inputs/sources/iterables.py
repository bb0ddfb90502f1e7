"""Sources of iterables, of functions that return one, and of iterators."""

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
    """The source of an iterable that can be read again, such as a list."""

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
    """The source of a function that returns an iterable for each pass."""

    def __init__(self, fn: Callable[[], Iterable[Any]]) -> None:
        super().__init__()
        self._fn = fn

    def open(self) -> Iterator[Any]:
        return iter(self._fn())


@final
class OneShotSource(Source):
    """The source of an iterator that can be read once, such as a generator."""

    restarts = False

    def __init__(self, iterator: Iterator[Any]) -> None:
        super().__init__()
        self._iterator = iterator

    def open(self) -> Iterator[Any]:
        # The chain keeps the user's generator open when a pass is closed.
        return itertools.chain(self._iterator)

    def keras_data(self) -> Any:
        return one_shot_batches(self.read())

"""Data of a `PyDataset`, a grain or PyTorch loader, a generator."""

import contextlib
import itertools
import sys
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sized
from typing import Any
from typing import final

import keras

from keras_dist.core.nests import map_nest
from keras_dist.core.rows import readable
from keras_dist.inputs.adapters import one_shot_batches
from keras_dist.inputs.sources.source import INFINITE
from keras_dist.inputs.sources.source import UNKNOWN
from keras_dist.inputs.sources.source import Source
from keras_dist.internals import keras_internals


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


@final
class GrainSource(Source):
    """The source of one of grain's datasets or loaders."""

    def __init__(self, dataset: Any) -> None:
        super().__init__()
        self._dataset = dataset

    def open(self) -> Iterator[Any]:
        return iter(self._dataset)

    @property
    def cardinality(self) -> int:
        if not isinstance(self._dataset, Sized):
            return UNKNOWN
        # A dataset that repeats for ever has the largest possible length.
        length = len(self._dataset)
        return INFINITE if length >= sys.maxsize // 2 else length

    def keras_data(self) -> Any:
        return self._dataset


@final
class PyDatasetSource(Source):
    """The source of a `PyDataset`, in the order of its indices.

    If the dataset has worker threads or processes of its own, they read it.
    """

    def __init__(self, dataset: keras.utils.PyDataset) -> None:
        super().__init__()
        self._dataset = dataset

    def open(self) -> Iterator[Any]:
        self._dataset.on_epoch_begin()
        with contextlib.closing(self._batches()) as batches:
            yield from batches
        self._dataset.on_epoch_end()

    def _batches(self) -> Any:
        if self._dataset.workers > 1 or self._dataset.use_multiprocessing:
            return keras_internals.read_with_workers(self._dataset)
        return self._read_here()

    def _read_here(self) -> Iterator[Any]:
        index = 0
        while self._dataset.num_batches is None or (
            index < self._dataset.num_batches
        ):
            yield self._dataset[index]
            index += 1

    def peek(self) -> list[Any]:
        # Unlike `open`, this calls no `on_epoch_begin`.
        batches = self._read_here()
        return [map_nest(readable, b) for b in itertools.islice(batches, 1)]

    @property
    def cardinality(self) -> int:
        num_batches = self._dataset.num_batches
        return INFINITE if num_batches is None else int(num_batches)

    def keras_data(self) -> Any:
        return self._dataset


@final
class TorchLoaderSource(Source):
    """The source of a `DataLoader`; batches that are lists become tuples."""

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self._loader = loader

    def open(self) -> Iterator[Any]:
        for batch in self._loader:
            yield tuple(batch) if isinstance(batch, list) else batch

    @property
    def cardinality(self) -> int:
        if isinstance(self._loader.dataset, Sized):
            return len(self._loader)
        return UNKNOWN

    def keras_data(self) -> Any:
        return self._loader

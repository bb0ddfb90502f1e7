"""Source of a `keras.utils.PyDataset`."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from typing import final

import keras

from keras_dist.core.leaves import readable
from keras_dist.core.regroup import map_nest
from keras_dist.inputs.sources.source import INFINITE
from keras_dist.inputs.sources.source import Source
from keras_dist.internals import keras_internals


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

"""Source of grain's `MapDataset`, `IterDataset` and `DataLoader`."""

import sys
from collections.abc import Iterator
from collections.abc import Sized
from typing import Any
from typing import final

from keras_dist.inputs.sources.source import INFINITE
from keras_dist.inputs.sources.source import UNKNOWN
from keras_dist.inputs.sources.source import Source


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

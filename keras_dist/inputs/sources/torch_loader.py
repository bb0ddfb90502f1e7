"""Source of a `torch.utils.data.DataLoader`."""

from collections.abc import Iterator
from collections.abc import Sized
from typing import Any
from typing import final

from keras_dist.inputs.sources.source import UNKNOWN
from keras_dist.inputs.sources.source import Source


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

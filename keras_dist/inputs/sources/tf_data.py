"""`tf.data.Dataset`."""

from collections.abc import Iterator
from typing import Any
from typing import final

import keras

from keras_dist.inputs.leaves import check_batched
from keras_dist.inputs.sources.source import Source
from keras_dist.inputs.sources.source import dtype_name
from keras_dist.regroup import map_nest


@final
class TensorFlowSource(Source):
    """A `tf.data.Dataset`, read eagerly.

    Args:
        dataset: The dataset.
    """

    def __init__(self, dataset: Any) -> None:
        super().__init__()
        self._dataset = dataset

    def open(self) -> Iterator[Any]:
        return iter(self._dataset)

    @property
    def cardinality(self) -> int:
        # Its own numbers for infinite and unknown are ours.
        return int(self._dataset.cardinality())

    def check_batched(self) -> None:
        check_batched(self.known_spec())

    def known_spec(self) -> Any:
        return map_nest(_keras_spec, self._dataset.element_spec)

    def trace(self) -> Any:
        return self._dataset

    def keras_data(self) -> Any:
        return self._dataset


def _keras_spec(spec: Any) -> Any:
    """A `keras.KerasTensor` where there is one for a `tf.TypeSpec`."""
    shape = getattr(spec, "shape", None)
    if shape is None or shape.rank is None or not hasattr(spec, "dtype"):
        return spec
    return keras.KerasTensor(
        tuple(shape),
        dtype_name(spec.dtype.name),
        sparse=type(spec).__name__ == "SparseTensorSpec",
        ragged=type(spec).__name__ == "RaggedTensorSpec",
    )

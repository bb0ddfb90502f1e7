"""Choice of the `Source` for a user's data."""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from keras_dist.inputs.sources.numpy_data import NumpyDataset
from keras_dist.inputs.sources.numpy_data import NumpySource
from keras_dist.inputs.sources.others import FunctionSource
from keras_dist.inputs.sources.others import GrainSource
from keras_dist.inputs.sources.others import IterableSource
from keras_dist.inputs.sources.others import OneShotSource
from keras_dist.inputs.sources.others import PyDatasetSource
from keras_dist.inputs.sources.others import TorchLoaderSource
from keras_dist.inputs.sources.source import Source
from keras_dist.inputs.sources.tf_data import TensorFlowSource
from keras_dist.internals import keras_internals

KINDS = (
    "a `tf.data.Dataset`, a `keras.utils.PyDataset`, a torch `DataLoader`, a "
    "grain dataset or loader, an iterable of batches, or a function without "
    "arguments that returns an iterable"
)


def source_of(data: Any, where: str) -> Source:
    """Returns the `Source` of a user's data.

    Raises `ValueError`, which names the method `where`, if the data can't be
    read, or if it is arrays without a batch size.
    """
    if keras_internals.is_tf_dataset(data):
        return TensorFlowSource(data)
    if isinstance(data, keras.utils.PyDataset):
        return PyDatasetSource(data)
    if isinstance(data, NumpyDataset):
        return NumpySource(data)
    if keras_internals.is_torch_dataloader(data):
        return TorchLoaderSource(data)
    if keras_internals.is_grain_dataset(data):
        return GrainSource(data)
    _refuse_arrays(data, where)
    if isinstance(data, Iterator):
        return OneShotSource(data)
    if isinstance(data, Iterable):
        return IterableSource(data)
    if callable(data):
        return FunctionSource(data)
    raise ValueError(
        f"`{where}` can't read its data. Received: {data!r} of type "
        f"{type(data).__name__}. Expected: {KINDS}."
    )


def _refuse_arrays(data: Any, where: str) -> None:
    is_array = isinstance(data, np.ndarray) or keras.ops.is_tensor(data)
    if is_array or isinstance(data, (tuple, Mapping, str, bytes)):
        raise ValueError(
            f"`{where}` can't tell the batch size of arrays; batch first. "
            f"Received: data of type {type(data).__name__}. Expected: {KINDS}. "
            "For arrays, `strategy.experimental_make_numpy_dataset(arrays)"
            ".batch(global_batch_size)` is one."
        )

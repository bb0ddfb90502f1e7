"""Sources: readers of users' data, one class for each kind of data."""

import contextlib
import itertools
import sys
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sized
from typing import Any

import keras
import numpy as np

from keras_dist.core.nests import map_nest
from keras_dist.core.rows import check_batched
from keras_dist.core.rows import readable
from keras_dist.inputs.sources.numpy_data import NumpyDataset
from keras_dist.inputs.sources.source import INFINITE
from keras_dist.inputs.sources.source import UNKNOWN
from keras_dist.inputs.sources.source import Source
from keras_dist.inputs.sources.source import dtype_name
from keras_dist.inputs.sources.source import rows_of_spec
from keras_dist.internals import keras_data

KINDS = (
    "a `tf.data.Dataset`, a `keras.utils.PyDataset`, a torch `DataLoader`, a "
    "grain dataset or loader, an iterable of batches, or a function without "
    "arguments that returns an iterable"
)


def source_of(data: object, where: str) -> Source:
    """Returns the `Source` of a user's data; errors name the method `where`."""
    if keras_data.is_tf_dataset(data):
        return TensorFlowSource(data)
    if isinstance(data, keras.utils.PyDataset):
        return PyDatasetSource(data)
    if isinstance(data, NumpyDataset):
        return NumpySource(data)
    if keras_data.is_torch_dataloader(data):
        return TorchLoaderSource(data)
    if keras_data.is_grain_dataset(data):
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


def _refuse_arrays(data: object, where: str) -> None:
    is_array = isinstance(data, np.ndarray) or keras.ops.is_tensor(data)
    if is_array or isinstance(data, (tuple, Mapping, str, bytes)):
        raise ValueError(
            f"`{where}` can't tell the batch size of arrays; batch first.\n"
            f"Received: data of type {type(data).__name__}. Expected: "
            f"{KINDS}. To batch arrays, use "
            "`strategy.experimental_make_numpy_dataset(arrays).batch(global_batch_size)`."
        )


class NumpySource(Source):
    _data: NumpyDataset

    @property
    def cardinality(self) -> int:
        return self._data.cardinality

    def known_spec(self) -> Any:
        return self._data.element_spec

    @property
    def rows(self) -> int:
        return rows_of_spec(self.known_spec())


class IterableSource(Source):
    """The source of an iterable that can be read again, such as a list."""

    @property
    def cardinality(self) -> int:
        return len(self._data) if isinstance(self._data, Sized) else UNKNOWN


class FunctionSource(Source):
    """The source of a function that returns an iterable for each pass."""

    def open(self) -> Iterator[Any]:
        return iter(self._data())


class OneShotSource(Source):
    """The source of an iterator that can be read once, such as a generator."""

    restarts = False

    def open(self) -> Iterator[Any]:
        # The chain keeps the user's generator open when a pass is closed.
        return itertools.chain(self._data)


class GrainSource(IterableSource):
    is_for_keras = True

    @property
    def cardinality(self) -> int:
        # A dataset that repeats for ever has the largest possible length.
        length = super().cardinality
        return INFINITE if length >= sys.maxsize // 2 else length


class PyDatasetSource(Source):
    """The source of a `PyDataset`, in the order of its indices."""

    is_for_keras = True

    def open(self) -> Iterator[Any]:
        self._data.on_epoch_begin()
        with contextlib.closing(self._batches()) as batches:
            yield from batches
        self._data.on_epoch_end()

    def _batches(self) -> Any:
        if self._data.workers > 1 or self._data.use_multiprocessing:
            return keras_data.read_with_workers(self._data)
        return self._read_here()

    def _read_here(self) -> Iterator[Any]:
        index = 0
        while self._data.num_batches is None or (
            index < self._data.num_batches
        ):
            yield self._data[index]
            index += 1

    def peek(self) -> list[Any]:
        # Unlike `open`, this calls no `on_epoch_begin`.
        batches = self._read_here()
        return [map_nest(readable, b) for b in itertools.islice(batches, 1)]

    @property
    def cardinality(self) -> int:
        num_batches = self._data.num_batches
        return INFINITE if num_batches is None else int(num_batches)


class TorchLoaderSource(Source):
    """The source of a `DataLoader`; batches that are lists become tuples."""

    is_for_keras = True

    def open(self) -> Iterator[Any]:
        for batch in self._data:
            yield tuple(batch) if isinstance(batch, list) else batch

    @property
    def cardinality(self) -> int:
        if isinstance(self._data.dataset, Sized):
            return len(self._data)
        return UNKNOWN


class TooFewFilesError(ValueError):
    """There are more workers than files that they could read."""

    def __init__(self, num_workers: int) -> None:
        super().__init__(
            "There are fewer files than workers. Received: a "
            "`tf.data.Dataset` with the `auto_shard_policy` FILE, on "
            f"{num_workers} workers. Expected: at least {num_workers} files, "
            "or the policy AUTO or DATA. With these, each worker reads all "
            "files and takes its own rows."
        )


class TensorFlowSource(Source):
    """The source of a `tf.data.Dataset`, read eagerly."""

    is_for_keras = True

    def __init__(
        self, dataset: Any, whole: Any = None, num_workers: int = 1
    ) -> None:
        super().__init__(dataset)
        # Kept alive, because the shard uses functions of the whole dataset.
        self._whole = whole
        self._num_workers = num_workers

    def open(self) -> Iterator[Any]:
        try:
            yield from self._data
        except Exception as error:
            if "FILE based sharding" not in str(error):
                raise
            raise TooFewFilesError(self._num_workers) from error

    @property
    def cardinality(self) -> int:
        # `tf.data` has the same numbers for infinite and unknown.
        return int(self._data.cardinality())

    @property
    def policy(self) -> int:
        options = self._data.options().experimental_distribute
        return int(options.auto_shard_policy.value)

    @property
    def batch_size(self) -> int:
        """Number of rows of a whole batch; 0 if batches differ."""
        # TensorFlow is loaded, because there is a dataset of its own.
        tf = sys.modules["tensorflow"]
        dataset = self._data if self._whole is None else self._whole
        variant = tf.data.experimental.to_variant(dataset)
        size = tf.raw_ops.ComputeBatchSize(input_dataset=variant)
        return max(int(size), 0)

    def shard(
        self, policy: int, num_workers: int, index: int
    ) -> "TensorFlowSource":
        """Returns the source of the shard that worker `index` reads."""
        tf = sys.modules["tensorflow"]
        spec = self._data.element_spec
        tensors = [
            leaf
            if isinstance(leaf, tf.TensorSpec)
            else tf.TensorSpec(None, tf.variant)
            for leaf in tf.nest.flatten(spec)
            if not isinstance(leaf, tf.NoneTensorSpec)
        ]
        try:
            variant = tf.raw_ops.AutoShardDataset(
                input_dataset=tf.data.experimental.to_variant(self._data),
                num_workers=num_workers,
                index=index,
                auto_shard_policy=policy,
                output_types=[leaf.dtype for leaf in tensors],
                output_shapes=[leaf.shape for leaf in tensors],
            )
        except tf.errors.NotFoundError as error:
            raise ValueError(
                "The dataset can't be sharded by files. Received: a "
                "`tf.data.Dataset` that reads no files, with the "
                "`auto_shard_policy` FILE. Expected: a reader of files such as "
                "`tf.data.TFRecordDataset`, or the policy AUTO or DATA."
            ) from error
        dataset = tf.data.experimental.from_variant(variant, spec)
        return TensorFlowSource(dataset, self._data, num_workers)

    def check_batched(self) -> None:
        check_batched(self.known_spec())

    def known_spec(self) -> Any:
        return map_nest(_keras_spec, self._data.element_spec)

    @property
    def rows(self) -> int:
        return rows_of_spec(self.known_spec())

    def trace(self) -> Any:
        return self._data


def _keras_spec(spec: object) -> Any:
    if type(spec).__name__ == "NoneTensorSpec":
        return None
    shape = getattr(spec, "shape", None)
    if shape is None or shape.rank is None or not hasattr(spec, "dtype"):
        return spec
    return keras.KerasTensor(
        tuple(shape),
        dtype_name(spec.dtype.name),
        sparse=type(spec).__name__ == "SparseTensorSpec",
        ragged=type(spec).__name__ == "RaggedTensorSpec",
    )

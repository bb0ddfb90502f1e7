"""Source of a `tf.data.Dataset`."""

import sys
from collections.abc import Iterator
from typing import Any
from typing import final

import keras

from keras_dist.core.nests import map_nest
from keras_dist.core.rows import check_batched
from keras_dist.inputs.sources.source import Source
from keras_dist.inputs.sources.source import dtype_name


class TooFewFilesError(ValueError):
    """There are more workers than files that they could read."""

    def __init__(self, num_workers: int) -> None:
        super().__init__(
            "There are fewer files than workers. Received: a "
            "`tf.data.Dataset` with the `auto_shard_policy` FILE, on "
            f"{num_workers} workers. Expected: at least {num_workers} files, "
            "or the policy AUTO or DATA, with which each worker reads all "
            "files and takes its own rows."
        )


@final
class TensorFlowSource(Source):
    """The source of a `tf.data.Dataset`, read eagerly.

    If the dataset is a shard, `whole` is the dataset that was divided among
    `num_workers` workers.
    """

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
        """The value of the dataset's `auto_shard_policy`."""
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
        """Returns the source of the shard that worker `index` reads.

        Raises `ValueError` if the policy needs files and there are none.
        """
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

    def trace(self) -> Any:
        return self._data

    def keras_data(self) -> Any:
        return self._data


def _keras_spec(spec: Any) -> Any:
    """Converts a `tf.TypeSpec` to a `keras.KerasTensor` where possible."""
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

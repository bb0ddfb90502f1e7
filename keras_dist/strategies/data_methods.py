"""The input methods of a strategy."""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING
from typing import Any

from keras_dist.core import context
from keras_dist.core.options import InputContext
from keras_dist.core.options import InputOptions
from keras_dist.inputs.dataset import distribute_dataset
from keras_dist.inputs.dataset import distribute_from_function
from keras_dist.inputs.sources.numpy_data import numpy_dataset
from keras_dist.replica.strategy_core import StrategyBase

if TYPE_CHECKING:
    from keras_dist.inputs.explanation import Explanation


class InputMethods(StrategyBase):
    """What a strategy does with data."""

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> Any:
        """Splits the batches of a dataset over the replicas.

        Replica `r` of `N` gets rows `ceil(n * r / N)` up to
        `ceil(n * (r + 1) / N)` of a batch of `n` rows: order kept, none lost.

        With several workers, `N` are the replicas of all. Each worker is
        given the same data, and gets the parts of its own replicas. For a
        `tf.data.Dataset`, `keras_dist.AutoShardPolicy` tells what else its
        options can ask for.

        Args:
            dataset: Data in batches of the global batch size: a
                `tf.data.Dataset`, `keras.utils.PyDataset`, torch
                `DataLoader`, grain dataset or loader, an iterable of batches,
                or a function without arguments that returns one.
            options: `InputOptions`.

        Returns:
            A `DistributedDataset`, which gives a batch with a `PerReplica` in
            place of each array. `fit` takes it too.

        Raises:
            ValueError: If the data is not batched, or options contradict each
                other.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> batches = [np.arange(4), np.arange(4, 7)]
        >>> dataset = strategy.experimental_distribute_dataset(batches)
        >>> [int(strategy.reduce("SUM", x, axis=0)) for x in dataset]
        [6, 15]
        """
        name = "experimental_distribute_dataset"
        context.check_cross_replica(self, name)
        return distribute_dataset(self, dataset, options)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> Any:
        """Gives the replicas the batches of a dataset that a function makes.

        Args:
            dataset_fn: Callable from an `InputContext` to data in batches of
                the per-replica size. It is called on each worker, whose
                replicas take them in turn. A worker with less data than
                another gets batches of no rows in the end. It may depend on
                its context and nothing else: `fit` calls it for the other
                workers too.
            options: `InputOptions`. With `InputReplicationMode.PER_REPLICA`
                it is called for each replica, which reads that data only.

        Returns:
            A `DistributedDataset`.

        Raises:
            ValueError: If the data can't be read, or options contradict each
                other.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> dataset = strategy.distribute_datasets_from_function(
        ...     lambda context: [np.ones(2), np.zeros(2)]
        ... )
        >>> next(iter(dataset)).values[1].shape[0]
        2
        """
        name = "distribute_datasets_from_function"
        context.check_cross_replica(self, name)
        return distribute_from_function(self, dataset_fn, options)

    def experimental_distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> Any:
        """The old name of `distribute_datasets_from_function`."""
        warnings.warn(
            "`experimental_distribute_datasets_from_function` is deprecated. "
            "Use `distribute_datasets_from_function`.",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.distribute_datasets_from_function(dataset_fn, options)

    def explain(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        batch_size: int | None = None,
    ) -> "Explanation":
        """Tells which rows of the next batch go to which replica.

        Of what `fit` takes, it tells how `fit`, `evaluate` and `predict` cut
        the first batch; of a distributed dataset, its iterator, or a list of
        batches that are tuples, what `strategy.run` gets of the next element.
        The two differ where a backend cuts batches in its own way. Rows are
        counted within the batch, in its order.

        Nothing is taken out of data that can be read again, or of a
        distributed dataset or its iterator; what is random goes on as if
        nothing had been read, except for a `DataLoader` or a
        `tf.data.Dataset` of another framework than the backend's. Other
        iterators, such as generators, lose the batch.

        With several workers, all of them have to call it for a distributed
        dataset.

        Args:
            x: What `fit` takes: arrays, or a nest of them, with `batch_size`;
                a `tf.data.Dataset`, `PyDataset`, `DataLoader`, iterable of
                batches. Or a `DistributedDataset` or its iterator. Arrays
                without `batch_size` are one batch.
            y: Array or nest of arrays, with arrays.
            sample_weight: Array or nest of arrays, with arrays.
            batch_size: Integer, the global batch size, with arrays.

        Returns:
            An `Explanation`: `print` it, or leave it to a notebook. `rows`
            has `worker`, `replica`, `device`, `first`, `last`, `num_rows`
            and `shape` of each replica.

        Raises:
            ValueError: If there is no batch, or if arguments contradict each
                other.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> explanation = strategy.explain(np.ones((20, 3)), batch_size=5)
        >>> for row in explanation.rows:
        ...     print(row.device, row.first, row.last, row.shape)
        cpu:0 0 2 (3, 3)
        cpu:1 3 4 (2, 3)
        """
        context.check_cross_replica(self, "explain")
        from keras_dist.inputs.explain import explain_data

        return explain_data(self, x, (y, sample_weight), batch_size)

    def experimental_make_numpy_dataset(
        self, numpy_input: Any, session: Any = None
    ) -> Any:
        """Makes a dataset of the rows of arrays.

        Args:
            numpy_input: NumPy array, or nest of arrays of one length.
            session: Ignored; it belongs to TensorFlow 1.

        Returns:
            An iterable of rows with `batch(batch_size)`. Once batched,
            `experimental_distribute_dataset` takes it. Where TensorFlow is
            installed, it has the other methods of a `tf.data.Dataset` too,
            which return one. It has copies of the arrays.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> rows = strategy.experimental_make_numpy_dataset(np.arange(4))
        >>> batched = rows.batch(2)
        >>> dataset = strategy.experimental_distribute_dataset(batched)
        >>> len(list(dataset))
        2
        """
        return numpy_dataset(numpy_input)

"""The methods of a strategy that distribute data."""

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
    from keras_dist.inputs.explain import Explanation


class InputMethods(StrategyBase):
    """The methods of a strategy that distribute data."""

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> Any:
        """Splits the batches of a dataset over the replicas.

        With `N` replicas on all workers together, replica `r` gets the rows
        from `ceil(n * r / N)` up to `ceil(n * (r + 1) / N)` of a batch of `n`
        rows.

        Pass the same data on each worker. Each worker gets the parts of its
        own replicas. The options of a `tf.data.Dataset` can choose another
        policy, see `keras_dist.AutoShardPolicy`.

        Args:
            dataset: Data in batches of the global batch size: a
                `tf.data.Dataset`, `keras.utils.PyDataset`, torch
                `DataLoader`, grain dataset or loader, an iterable of batches,
                or a function without arguments that returns one. A batch is an
                array, or a nest of arrays.
            options: `InputOptions`, or `None` for the defaults.

        Returns:
            A `DistributedDataset`, whose elements are batches with a
            `PerReplica` in place of each array. `fit` accepts it too.

        Raises:
            ValueError: If the data is not batched, or if options contradict
                each other.
            NotImplementedError: If the options request a separate dataset for
                each replica.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> batches = [np.arange(4), np.arange(4, 7)]
        >>> dataset = strategy.experimental_distribute_dataset(batches)
        >>> [int(strategy.reduce("SUM", x, axis=0)) for x in dataset]
        [6, 15]
        """
        context.check_cross_replica(self, "experimental_distribute_dataset")
        return distribute_dataset(self, dataset, options)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> Any:
        """Distributes the batches of datasets that a function makes.

        Each batch goes to one replica. If the last step has too few batches,
        the other replicas get arrays with 0 rows. But if all batches have the
        same static number of rows (`drop_remainder=True`), that step is left
        out.

        Args:
            dataset_fn: Callable from an `InputContext` to data in batches of
                the per-replica size. It is called once on each worker, and
                the worker's replicas take batches in turn. A worker with less
                data gets batches with 0 rows at the end. The result must
                depend only on the context, because `fit` also calls the
                function for the other workers.
            options: `InputOptions`, or `None` for the defaults. With
                `InputReplicationMode.PER_REPLICA`, the function is called for
                each replica, and each replica reads its own data.

        Returns:
            A `DistributedDataset`.

        Raises:
            ValueError: If the data can't be read, or if options contradict
                each other.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> dataset = strategy.distribute_datasets_from_function(
        ...     lambda context: [np.ones(2), np.zeros(2)]
        ... )
        >>> next(iter(dataset)).values[1].shape[0]
        2
        """
        context.check_cross_replica(self, "distribute_datasets_from_function")
        return distribute_from_function(self, dataset_fn, options)

    def experimental_distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> Any:
        """Calls `distribute_datasets_from_function`; deprecated."""
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
        """Explains which rows of the next batch go to which replica.

        For the data of `fit`, it explains how `fit`, `evaluate` and `predict`
        split the first batch. For a distributed dataset, its iterator, or a
        list of batches that are tuples, it explains which rows of the next
        element `strategy.run` passes to each replica. The two differ if the
        backend splits batches in its own way. Row numbers count from the start
        of the batch.

        Data that can be read again loses no batch, and keeps its random
        states. So do a distributed dataset and its iterator. An exception is
        a `DataLoader` or a `tf.data.Dataset` if the backend is another
        framework. Other iterators, such as generators, lose the batch.

        With several workers, all of them have to call `explain` for a
        distributed dataset.

        Args:
            x: Data as for `fit`: an array or nest of arrays, which is one
                batch if there is no `batch_size`; or a `tf.data.Dataset`,
                `PyDataset`, `DataLoader` or iterable of batches. Or a
                `DistributedDataset` or its iterator.
            y: Array or nest of arrays, only if `x` is arrays.
            sample_weight: Array or nest of arrays, only if `x` is arrays.
            batch_size: Integer, the global batch size, only if `x` is arrays.

        Returns:
            An `Explanation`, which you can print. Its `rows` have `worker`,
            `replica`, `device`, `first`, `last`, `num_rows` and `shape` of
            each replica.

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
            numpy_input: NumPy array, or nest of arrays of the same length.
                The dataset copies the arrays.
            session: Ignored; it belongs to TensorFlow 1.

        Returns:
            An iterable of rows with a method `batch(batch_size)`, which
            returns data for `experimental_distribute_dataset`. If TensorFlow
            is installed, it also has the other methods of a
            `tf.data.Dataset`; each returns a `tf.data.Dataset`.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> rows = strategy.experimental_make_numpy_dataset(np.arange(4))
        >>> batched = rows.batch(2)
        >>> dataset = strategy.experimental_distribute_dataset(batched)
        >>> len(list(dataset))
        2
        """
        return numpy_dataset(numpy_input)

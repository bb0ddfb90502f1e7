"""DistributedDataset, and the functions that make one."""

from collections.abc import Callable
from typing import TYPE_CHECKING
from typing import Any
from typing import final

from keras_dist.core.options import InputContext
from keras_dist.core.options import InputOptions
from keras_dist.core.options import InputReplicationMode
from keras_dist.core.options import check_input_options
from keras_dist.inputs.feed_choice import feed_of_batches
from keras_dist.inputs.feed_choice import feed_of_function
from keras_dist.inputs.feeds import Feed
from keras_dist.inputs.iterator import DistributedIterator
from keras_dist.inputs.iterator import check_place
from keras_dist.inputs.placement import Placement
from keras_dist.inputs.sharding import AutoShardPolicy
from keras_dist.inputs.sharding import off_in_fit
from keras_dist.inputs.sharding import policy_of
from keras_dist.inputs.sources.choice import source_of
from keras_dist.inputs.sources.tf_data import TensorFlowSource
from keras_dist.inputs.traced import reduce_in_graph
from keras_dist.internals import keras_internals
from keras_dist.plugin.front_end import StepsOfData

if TYPE_CHECKING:
    from keras_dist.replica.strategy_core import StrategyBase


@final
class DistributedDataset(StepsOfData):
    """Data in steps, each with a part for every replica on its device.

    Made by `strategy.experimental_distribute_dataset` and
    `strategy.distribute_datasets_from_function`. It can be iterated over,
    also several times, and given to `model.fit`; it has no transformations
    and no length. Iterators are for outside of a `tf.function`; inside, only
    `reduce` reads data.

    A global batch of `n` rows is split in order: replica `r` of `N` gets rows
    `ceil(n * r / N)` up to `ceil(n * (r + 1) / N)`. A replica without rows
    gets arrays of none, of the right dtype and trailing shape.

    With several workers, each has the parts of its own replicas, in equally
    many steps. Where workers read different data (see `AutoShardPolicy`, and
    `distribute_datasets_from_function`), they agree in each step whether it
    is the last one: all of them have to take it.

    Args:
        feed: The `Feed` of each replica's part.
        placement: The `Placement` of the parts.
        options: The `InputOptions`.
        strategy: The `Strategy` whose replicas the parts are for.

    Example:

    >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> data = strategy.experimental_distribute_dataset(
    ...     [keras.ops.arange(4.0), keras.ops.arange(3.0)]
    ... )
    >>> for batch in data:
    ...     print([part.shape[0] for part in batch.values])
    [2, 2]
    [2, 1]
    """

    def __init__(
        self,
        feed: Feed,
        placement: Placement,
        options: InputOptions,
        strategy: "StrategyBase | None" = None,
    ) -> None:
        self._strategy = strategy
        self._feed = feed
        self._placement = placement
        self._ahead = options.experimental_per_replica_buffer_size
        self._only_iterator: DistributedIterator | None = None

    def __iter__(self) -> DistributedIterator:
        """Begins a pass.

        Data that can be read only once, such as a generator, has one
        iterator: a second loop goes on where the first one was left.

        Raises:
            ValueError: If such data was read to its end, or in a replica
                function.
            NotImplementedError: Inside of a `tf.function`.
        """
        check_place("iter(dataset)")
        if self._only_iterator is not None:
            if self._only_iterator.is_over:
                raise ValueError(
                    "The data was read to its end, and can't be read again. "
                    "Received: an iterator, such as a generator. Expected, "
                    "for several passes: a list, a dataset, or the function "
                    "without arguments that makes the iterator."
                )
            return self._only_iterator
        iterator = DistributedIterator(
            self._feed.steps(),
            self._placement,
            self._ahead,
            self._spec,
            self._strategy,
        )
        if not self._feed.restarts:
            self._only_iterator = iterator
        return iterator

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes of the elements.

        Returns:
            A nest like an element: a `PerReplica` of `keras.KerasTensor`s for
            each leaf, or one `keras.KerasTensor` with one replica. Rows are
            `None`, unless every batch has the same number and it can be
            divided by the replicas. Data that does not know it has its first
            batch read, which is then delivered as usual.

        Raises:
            ValueError: If there is no batch to read.
        """
        return self._spec()

    @property
    def cardinality(self) -> int:
        """Number of steps of a pass, -1 if it never ends, -2 if unknown.

        It is unknown where workers have different numbers of batches.
        """
        return self._feed.cardinality

    @property
    def restarts(self) -> bool:
        """Whether each loop begins anew; not so of what a generator gives."""
        return self._feed.restarts

    def reduce(
        self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]
    ) -> Any:
        """Combines the elements of a pass.

        Inside of a `tf.function` the data has to be a `tf.data.Dataset`, the
        states of one structure, and their dtypes and shapes stay the same.

        Args:
            initial_state: Any object, the state before the first element.
            reduce_func: Callable from a state and an element to a state.

        Returns:
            The last state.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> batches = [keras.ops.arange(4)]
        >>> data = strategy.experimental_distribute_dataset(batches)
        >>> def add(state, element):
        ...     return state + int(strategy.reduce("SUM", element, axis=0))
        >>> data.reduce(0, add)
        6
        """
        if keras_internals.in_tf_graph():
            return reduce_in_graph(
                self._feed, self._placement, initial_state, reduce_func
            )
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state

    def global_batches(self) -> Any:
        """The same rows as `fit` takes them: in global batches, on the host.

        `fit` has every worker read all rows. So what differs between workers
        is read here as each of them would: a function is called for every
        worker, and every worker's files are read.

        Returns:
            The user's own dataset where Keras reads it, else an adapter of
            its batches.

        Raises:
            ValueError: If each worker has a dataset of its own, by the policy
                `OFF`, which others can't read.
        """
        return self._feed.keras_data()

    def _spec(self) -> Any:
        return self._placement.spec(self._feed.spec)


def distribute_dataset(
    strategy: "StrategyBase", dataset: Any, options: InputOptions | None = None
) -> DistributedDataset:
    """Splits global batches over a strategy's replicas.

    Args:
        strategy: The `Strategy`.
        dataset: Data in batches of the global batch size: a
            `tf.data.Dataset`, a `keras.utils.PyDataset`, a torch
            `DataLoader`, a grain dataset or loader, any iterable of batches,
            or a function without arguments that returns one. A batch is an
            array, or a nest of arrays. With one replica nothing is split,
            and elements may be anything.
        options: An `InputOptions`, or `None` for the default ones.

    Returns:
        A `DistributedDataset`.

    Raises:
        ValueError: If data is not batched, or options contradict each other.
        NotImplementedError: If a dataset for each replica is asked for.
    """
    _refuse_distributed(dataset)
    checked = check_input_options(options)
    mode = checked.experimental_replication_mode
    if mode is InputReplicationMode.PER_REPLICA:
        raise NotImplementedError(
            "InputReplicationMode.PER_REPLICA is only supported in "
            "`distribute_datasets_from_function`, where each replica gets a "
            f"dataset of its own. Received: {checked!r}."
        )
    source = source_of(dataset, "experimental_distribute_dataset")
    return DistributedDataset(
        feed_of_batches(strategy, source),
        Placement(strategy.executor, checked),
        checked,
        strategy,
    )


def distribute_from_function(
    strategy: "StrategyBase",
    dataset_fn: Callable[[InputContext], Any],
    options: InputOptions | None = None,
) -> DistributedDataset:
    """Gives replicas the elements of datasets that a function makes.

    Nothing is split or batched: each element is one replica's batch. With an
    incomplete last step, the replicas that are left get arrays of no rows;
    if all batches have one static number of rows (`drop_remainder=True`),
    the step is left out.

    Args:
        strategy: The `Strategy`.
        dataset_fn: Callable from an `InputContext` to data of any kind that
            `distribute_dataset` takes. It is called once a worker, whose
            replicas take elements in turn. With
            `InputReplicationMode.PER_REPLICA` it is called for each replica,
            which reads that dataset only. `fit` calls it for every worker.
        options: An `InputOptions`, or `None` for the default ones.

    Returns:
        A `DistributedDataset`.

    Raises:
        ValueError: If data can't be read, or options contradict each other.
    """
    checked = check_input_options(options)
    num_replicas = strategy.num_replicas_in_sync

    def source(pipelines: int, index: int) -> Any:
        made = dataset_fn(InputContext(pipelines, index, num_replicas))
        _refuse_distributed(made)
        return source_of(made, "distribute_datasets_from_function")

    mode = checked.experimental_replication_mode
    return DistributedDataset(
        feed_of_function(strategy, source, mode),
        Placement(strategy.executor, checked),
        checked,
        strategy,
    )


def data_for_fit(strategy: "StrategyBase", data: Any) -> Any:
    """What `fit` and its relatives read: the same rows on each worker.

    Policies of a `tf.data.Dataset` say who reads what, and no more: with all
    but `OFF` and `HINT` it is read as on one device.

    Args:
        strategy: The `Strategy`.
        data: Anything that was given to `fit`.

    Returns:
        For a `DistributedDataset`, its global batches; so for the policy
        `HINT`. Anything else as it is.

    Raises:
        ValueError: If each worker has a dataset of its own, by the policy
            `OFF`.
    """
    if isinstance(data, DistributedDataset):
        return data.global_batches()
    count = strategy.plan.num_workers
    if count == 1 or not keras_internals.is_tf_dataset(data):
        return data
    policy = policy_of(TensorFlowSource(data))
    if policy is AutoShardPolicy.OFF:
        raise ValueError(off_in_fit(count))
    if policy is AutoShardPolicy.HINT:
        return distribute_dataset(strategy, data).global_batches()
    return data


def _refuse_distributed(data: Any) -> None:
    if isinstance(data, DistributedDataset):
        raise ValueError(
            "The dataset is distributed already. Received: a "
            "`DistributedDataset`. Expected: the data that it was made of."
        )

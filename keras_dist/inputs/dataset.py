"""DistributedDataset, and the functions that make one."""

from collections.abc import Callable
from typing import Any
from typing import final

import keras

from keras_dist.core.options import InputContext
from keras_dist.core.options import InputOptions
from keras_dist.core.options import InputReplicationMode
from keras_dist.core.options import check_input_options
from keras_dist.inputs import feed_choice
from keras_dist.inputs.feeds import Feed
from keras_dist.inputs.feeds import GlobalFeed
from keras_dist.inputs.iterator import BatchPlacement
from keras_dist.inputs.iterator import DistributedIterator
from keras_dist.inputs.iterator import check_place
from keras_dist.inputs.sources.choice import TensorFlowSource
from keras_dist.inputs.sources.choice import source_of
from keras_dist.internals import keras_data
from keras_dist.internals import keras_internals
from keras_dist.plugin.front_end import StepsOfData
from keras_dist.replica.strategy_core import StrategyBase


@final
class DistributedDataset(StepsOfData):
    """Data in steps, with a part for every replica in each step.

    `strategy.experimental_distribute_dataset` and
    `strategy.distribute_datasets_from_function` create it. Each part is on the
    device of its replica. You can iterate over the dataset several times, and
    pass it to `model.fit`. It has no transformations and no length.

    Inside of a `tf.function`, use `reduce` or a `for` loop over the dataset.
    Other iterators don't work there.

    A global batch of `n` rows is split in order. Replica `r` of `N` gets the
    rows from `ceil(n * r / N)` up to `ceil(n * (r + 1) / N)`. A replica without
    rows gets arrays with 0 rows, of the right dtype and trailing shape.

    With several workers, each worker has the parts of its own replicas, and
    all have the same number of steps. If workers read different data (see
    `AutoShardPolicy` and `distribute_datasets_from_function`), they agree in
    each step whether it is the last one. So all workers have to take each step.

    Args:
        feed: The `Feed` of each replica's part.
        options: The `InputOptions`.
        strategy: The `Strategy` of the replicas.

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
        self, feed: Feed, options: InputOptions, strategy: StrategyBase
    ) -> None:
        self._strategy = strategy
        self._feed = feed
        self._placement = BatchPlacement(strategy.executor, options)
        self._ahead = options.experimental_per_replica_buffer_size
        self._only_iterator: DistributedIterator | None = None

    def __iter__(self) -> DistributedIterator:
        """Begins a pass over the data.

        Data that can be read only once, such as a generator, has a single
        iterator. A second loop continues where the first one stopped.

        Raises:
            ValueError: If data that can be read only once was read to its
                end, or if called in a replica function.
            NotImplementedError: If called inside of a `tf.function`.
        """
        check_place("iter(dataset)")
        if self._only_iterator is not None:
            if self._only_iterator.is_over:
                raise ValueError(
                    "The data was read to its end, and can't be read again.\n"
                    "Received: an iterator, such as a generator. Expected: "
                    "data that can be read several times. Pass a list, a "
                    "dataset, or a function without arguments that makes the "
                    "iterator."
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
            A nest like an element. Each leaf is a `PerReplica` of
            `keras.KerasTensor`s, or one `keras.KerasTensor` with one replica.
            The number of rows is `None`, unless all batches have the same
            number and it is a multiple of the number of replicas. If the data
            has no spec, the first batch is read, and comes later as usual.

        Raises:
            ValueError: If there is no batch to read.
        """
        return self._spec()

    @property
    def cardinality(self) -> int:
        """Number of steps of a pass, -1 if it never ends, -2 if unknown.

        The number is unknown if workers have different numbers of batches.
        """
        return self._feed.cardinality

    @property
    def restarts(self) -> bool:
        """True if each loop begins again; false for data from a generator."""
        return self._feed.restarts

    def reduce(
        self, initial_state: object, reduce_func: Callable[[Any, Any], Any]
    ) -> Any:
        """Combines the elements of a pass.

        Inside of a `tf.function`, the data has to be a `tf.data.Dataset`, and
        all states must have the same structure, dtypes and shapes.

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
            return _reduce_in_graph(
                self._feed, self._placement, initial_state, reduce_func
            )
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state

    def global_batches(self, own_rows: bool = False) -> Any:
        """Returns the rows in global batches on the host, for `fit`.

        This worker also reads the data of all other workers: it calls the
        dataset function for each of them, and reads the files of each. It does
        not if `own_rows` allows that, and if all workers know before they read
        that they have as many steps, of as many rows.

        Args:
            own_rows: Boolean, whether batches may have the rows of this
                worker only.

        Returns:
            The user's own dataset if Keras can read it, else an adapter of
            its batches.

        Raises:
            ValueError: If the policy is `OFF`. Then each worker has its own
                dataset, which other workers can't read.
        """
        return self._feed.keras_data(own_rows)

    def _spec(self) -> Any:
        return self._placement.spec(self._feed.spec)


def _reduce_in_graph(
    feed: Feed,
    placement: BatchPlacement,
    initial_state: object,
    reduce_func: Callable[[Any, Any], Any],
) -> Any:
    """Implements `DistributedDataset.reduce` in a loop of the graph."""
    data = feed.trace() if isinstance(feed, GlobalFeed) else None
    if not isinstance(feed, GlobalFeed) or data is None:
        raise NotImplementedError(
            "Inside of a `tf.function`, a distributed dataset can be read "
            "only if `experimental_distribute_dataset` made it from a "
            "`tf.data.Dataset`, and if all workers read the same batches. "
            f"Received: other data, in a `{type(feed).__name__}`. Expected: a "
            "loop outside of the `tf.function` that passes each element to a "
            "compiled step."
        )
    iterator = iter(data)

    def step(_: object, state: object) -> tuple[Any, Any]:
        optional = iterator.get_next_as_optional()
        has_value = optional.has_value()
        # A graph has both branches, so the loop itself checks for the end.
        return has_value, keras.ops.cond(
            has_value,
            lambda: reduce_func(
                state, placement(feed.split(optional.get_value()))
            ),
            lambda: state,
        )

    _, state = keras.ops.while_loop(
        lambda has_value, _: has_value, step, (True, initial_state)
    )
    return state


def distribute_dataset(
    strategy: StrategyBase, dataset: object, options: InputOptions | None = None
) -> DistributedDataset:
    """Implements `strategy.experimental_distribute_dataset`."""
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
    feed = feed_choice.feed_of_batches(strategy, source)
    return DistributedDataset(feed, checked, strategy)


def distribute_from_function(
    strategy: StrategyBase,
    dataset_fn: Callable[[InputContext], Any],
    options: InputOptions | None = None,
) -> DistributedDataset:
    """Implements `strategy.distribute_datasets_from_function`."""
    checked = check_input_options(options)
    num_replicas = strategy.num_replicas_in_sync

    def source(pipelines: int, index: int) -> Any:
        made = dataset_fn(InputContext(pipelines, index, num_replicas))
        _refuse_distributed(made)
        return source_of(made, "distribute_datasets_from_function")

    mode = checked.experimental_replication_mode
    feed = feed_choice.feed_of_function(strategy, source, mode)
    return DistributedDataset(feed, checked, strategy)


def data_for_fit(
    strategy: StrategyBase, data: object, own_rows: bool = False
) -> Any:
    """Converts the data of `fit` to global batches, the same on all workers.

    With `own_rows`, these may have the rows of this worker only.
    """
    if isinstance(data, DistributedDataset):
        return data.global_batches(own_rows)
    count = strategy.plan.num_workers
    if count == 1 or not keras_data.is_tf_dataset(data):
        return data
    policy = feed_choice.policy_of(TensorFlowSource(data))
    if policy is feed_choice.AutoShardPolicy.OFF:
        raise ValueError(feed_choice.off_in_fit(count))
    if policy is feed_choice.AutoShardPolicy.HINT:
        return distribute_dataset(strategy, data).global_batches(own_rows)
    return data


def _refuse_distributed(data: object) -> None:
    if isinstance(data, DistributedDataset):
        raise ValueError(
            "The dataset is distributed already. Received: a "
            "`DistributedDataset`. Expected: the data that it was made from."
        )

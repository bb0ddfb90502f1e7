"""Deprecated methods of strategies, from `tf.compat.v1.distribute`."""

import copy
import warnings
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any
from typing import final

from keras_dist.core.options import InputContext
from keras_dist.core.options import InputReplicationMode
from keras_dist.errors import OutOfRangeError
from keras_dist.strategies.data_methods import InputMethods
from keras_dist.strategies.replica_methods import ReplicaMethods


@final
class InputIterator:
    """An iterator over a dataset that can be restarted."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._iterator: Any = None

    def initialize(self) -> list[Any]:
        """Restarts at the first element.

        Returns:
            An empty list: there are no graph operations to run.
        """
        self._iterator = iter(self._dataset)
        return []

    @property
    def initializer(self) -> list[Any]:
        """An empty list of graph operations; reading it calls `initialize`."""
        return self.initialize()

    def get_next(self) -> Any:
        """Returns the next element, a nest of per-replica values.

        Raises:
            OutOfRangeError: At the end. It is a `StopIteration` too.
        """
        if self._iterator is None:
            self.initialize()
        try:
            return next(self._iterator)
        except StopIteration:
            raise OutOfRangeError(
                "End of the data: there is no next element. Call "
                "`initialize()` to start again."
            ) from None


def _batches_of(get_next: Callable[[], Any]) -> Iterator[Any]:
    """Yields the results of a function until it raises `StopIteration`.

    `OutOfRangeError` ends the batches too.
    """
    while True:
        try:
            batch = get_next()
        except (StopIteration, OutOfRangeError):
            return
        yield batch


class V1Methods(ReplicaMethods, InputMethods):
    """Methods for programs written for `tf.compat.v1.distribute`."""

    def experimental_run(
        self, fn: Callable[..., Any], input_iterator: Any = None
    ) -> Any:
        """Calls `run` with an iterator's next element; deprecated.

        Args:
            fn: Callable, called once for each replica.
            input_iterator: An iterator from `make_dataset_iterator` or
                `make_input_fn_iterator`. `None` to call `fn` without
                arguments.

        Returns:
            The result of `run`.
        """
        warnings.warn(
            "`experimental_run` is deprecated. Use `run`.",
            DeprecationWarning,
            stacklevel=2,
        )
        args = () if input_iterator is None else (input_iterator.get_next(),)
        return self.run(fn, args=args)

    def make_dataset_iterator(self, dataset: Any) -> InputIterator:
        """Makes an iterator over data split over replicas; deprecated.

        Use `iter(strategy.experimental_distribute_dataset(dataset))`.

        Args:
            dataset: Data in batches of the global batch size, as for
                `experimental_distribute_dataset`.

        Returns:
            An object with `initialize()` and `get_next()`.
        """
        return InputIterator(self.experimental_distribute_dataset(dataset))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode = (
            InputReplicationMode.PER_WORKER
        ),
    ) -> InputIterator:
        """Makes an iterator over data that a function makes; deprecated.

        Use `iter(strategy.distribute_datasets_from_function(input_fn))`.

        Args:
            input_fn: Callable from an `InputContext` to data in batches of
                the per-replica size; or to a callable without arguments
                that returns one such batch at each call, and at the end raises
                `StopIteration` or `OutOfRangeError`.
            replication_mode: `InputReplicationMode.PER_WORKER`.

        Returns:
            An object with `initialize()` and `get_next()`.

        Raises:
            ValueError: If `replication_mode` has another value.
        """
        if replication_mode is not InputReplicationMode.PER_WORKER:
            raise ValueError(
                "Input replication mode not supported. Received: "
                f"replication_mode={replication_mode!r}. Expected: "
                "InputReplicationMode.PER_WORKER. For a dataset of each "
                "replica's own use `distribute_datasets_from_function` with "
                "`InputOptions`."
            )

        def dataset_fn(input_context: InputContext) -> Any:
            made = input_fn(input_context)
            if not callable(made) or isinstance(made, Iterable):
                return made
            return _batches_of(made)

        return InputIterator(self.distribute_datasets_from_function(dataset_fn))

    def unwrap(self, value: Any) -> tuple[Any, ...]:
        """Calls `experimental_local_results`; its older name."""
        return self.experimental_local_results(value)

    def group(self, value: Any, name: str | None = None) -> None:
        """Does nothing, since operations run at once rather than in groups."""

    def update_config_proto(self, config_proto: Any) -> Any:
        """Returns a copy of the configuration, which needs no change."""
        return copy.copy(config_proto)

    def configure(
        self,
        session_config: Any = None,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Does nothing, since there are no sessions to configure."""

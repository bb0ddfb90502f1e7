"""Methods that `tf.distribute` keeps for older programs."""

import copy
import warnings
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any
from typing import final

import keras

from keras_dist.core import context
from keras_dist.core.options import InputContext
from keras_dist.core.options import InputOptions
from keras_dist.core.options import InputReplicationMode
from keras_dist.core.reduction import ReduceOp
from keras_dist.errors import OutOfRangeError
from keras_dist.replica.strategy_core import StrategyBase


@final
class InputIterator:
    """A restartable iterator over a dataset."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._iterator: Any = None

    def initialize(self) -> list[Any]:
        """Restarts at the first element; returns no graph operations."""
        self._iterator = iter(self._dataset)
        return []

    @property
    def initializer(self) -> list[Any]:
        """An empty list of graph operations; reading it calls `initialize`."""
        return self.initialize()

    def get_next(self) -> Any:
        """Returns the next element, a nest of per-replica values.

        Raises:
            OutOfRangeError: At the end. It is also a `StopIteration`.
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
    """Yields the results of a function until it raises `StopIteration`."""
    while True:
        try:
            batch = get_next()
        except StopIteration:
            return
        yield batch


class DeprecatedMethods(StrategyBase):
    """Old names, and methods for programs of `tf.compat.v1.distribute`."""

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

    def colocate_vars_with(self, colocate_with_variable: keras.Variable) -> Any:
        """Calls `extended.colocate_vars_with`; this is its old name."""
        return self.extended.colocate_vars_with(colocate_with_variable)

    def experimental_run(
        self, fn: Callable[..., Any], input_iterator: Any = None
    ) -> Any:
        """Calls `run` with an iterator's next element; deprecated.

        Args:
            fn: Callable, called once for each replica.
            input_iterator: An iterator from `make_dataset_iterator` or
                `make_input_fn_iterator`. With `None`, `fn` is called without
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

    def make_dataset_iterator(self, dataset: object) -> InputIterator:
        """Makes an iterator over data that is split over replicas; deprecated.

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
                the per-replica size. It may also return a callable without
                arguments. Each call of that returns one batch; at the end, it
                raises `StopIteration` or `OutOfRangeError`.
            replication_mode: `InputReplicationMode.PER_WORKER`.

        Returns:
            An object with `initialize()` and `get_next()`.

        Raises:
            ValueError: If `replication_mode` has another value.
        """
        if replication_mode is not InputReplicationMode.PER_WORKER:
            raise ValueError(
                "Input replication mode not supported.\nReceived: "
                f"replication_mode={replication_mode!r}. Expected: "
                "InputReplicationMode.PER_WORKER. If each replica "
                "should get its own dataset, use "
                "`distribute_datasets_from_function` with `InputOptions`."
            )

        def dataset_fn(input_context: InputContext) -> Any:
            made = input_fn(input_context)
            if not callable(made) or isinstance(made, Iterable):
                return made
            return _batches_of(made)

        return InputIterator(self.distribute_datasets_from_function(dataset_fn))

    def unwrap(self, value: object) -> tuple[Any, ...]:
        """Calls `experimental_local_results`; this is its old name."""
        return self.experimental_local_results(value)

    def group(self, value: object, name: str | None = None) -> None:
        """Does nothing, since operations run at once rather than in groups."""

    def update_config_proto(self, config_proto: object) -> Any:
        """Returns a copy of the configuration, which needs no change."""
        return copy.copy(config_proto)

    def configure(
        self,
        session_config: object = None,
        cluster_spec: object = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Does nothing, since there are no sessions to configure."""


@final
class MultiStepContext:
    """The outputs of the last of several steps."""

    def __init__(
        self, strategy: Any, initial_outputs: dict[str, Any] | None = None
    ) -> None:
        self._strategy = strategy
        self.last_step_outputs: dict[str, Any] = dict(initial_outputs or {})
        self.non_tensor_outputs: dict[str, Any] = {}

    @property
    def run_op(self) -> None:
        """`None`, since the steps have run and no graph operation exists."""

    def set_last_step_output(
        self, name: str, output: object, reduce_op: ReduceOp | str | None = None
    ) -> None:
        """Sets an output, in place of the one from an earlier step.

        In a replica function, all replicas have to make this call.

        Args:
            name: String, the key in `last_step_outputs`.
            output: Tensor, or nest of per-replica values.
            reduce_op: `ReduceOp`, or its name, to combine the output over
                replicas. `None` keeps the output as it is.
        """

        def set_it(strategy: Any, value: Any) -> None:
            if reduce_op is not None:
                value = strategy.reduce(reduce_op, value, axis=None)
            self.last_step_outputs[name] = value

        self._together(set_it, output)

    def set_non_tensor_output(self, name: str, output: object) -> None:
        """Sets an output that is no tensor; from replicas, a tuple of all.

        Args:
            name: String, the key in `non_tensor_outputs`.
            output: Any object.
        """
        in_replica = context.current_replica_context() is not None

        def set_it(strategy: Any, value: Any) -> None:
            if in_replica:
                value = strategy.experimental_local_results(value)
            self.non_tensor_outputs[name] = value

        self._together(set_it, output)

    def _together(self, set_it: Any, output: Any) -> None:
        replica = context.current_replica_context()
        if replica is None:
            set_it(self._strategy, output)
        else:
            replica.merge_call(set_it, args=(output,))

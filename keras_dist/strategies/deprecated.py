"""Methods that `tf.distribute` keeps for older programs."""

import copy
import warnings
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import final

import numpy as np

from keras_dist.core import context
from keras_dist.core.options import InputContext
from keras_dist.core.options import InputReplicationMode
from keras_dist.core.reduction import ReduceOp
from keras_dist.errors import OutOfRangeError
from keras_dist.strategies.data_methods import InputMethods
from keras_dist.strategies.replica_methods import ReplicaMethods


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


class DeprecatedMethods(ReplicaMethods, InputMethods):
    """Methods for programs written for `tf.compat.v1.distribute` or TPUs.

    At present, a replica has one logical device. So the methods about logical
    devices only check their arguments, and return the tensor.
    """

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

    def make_dataset_iterator(self, dataset: Any) -> InputIterator:
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
                "Input replication mode not supported. Received: "
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

    def unwrap(self, value: Any) -> tuple[Any, ...]:
        """Calls `experimental_local_results`; this is its old name."""
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

    def experimental_assign_to_logical_device(
        self, tensor: Any, logical_device_id: int
    ) -> Any:
        """Keeps a tensor on one logical device of the replica.

        Args:
            tensor: Tensor to place.
            logical_device_id: Integer, from 0.

        Returns:
            The tensor.

        Raises:
            ValueError: If a replica has no logical device of this number.
            NotImplementedError: If a replica has several logical devices.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.experimental_assign_to_logical_device(1.5, 0)
        1.5
        """
        count = self._num_logical_devices
        is_integer = isinstance(logical_device_id, (int, np.integer))
        if not is_integer or not 0 <= logical_device_id < count:
            raise ValueError(
                "`logical_device_id` must be a logical device of the replica. "
                f"Received: logical_device_id={logical_device_id!r}. Expected: "
                f"an integer from 0 to {count - 1}; a replica of {self!r} has "
                f"{count} logical device(s)."
            )
        return self._unmoved(tensor)

    def experimental_split_to_logical_devices(
        self, tensor: Any, partition_dimensions: Sequence[int]
    ) -> Any:
        """Splits a tensor over the logical devices of the replica.

        Args:
            tensor: Tensor to split.
            partition_dimensions: List or tuple with an integer for each axis,
                the number of parts along that axis.

        Returns:
            The tensor, with the same value.

        Raises:
            ValueError: If there is not one integer for each axis, if an axis
                can't be divided by its integer, or if the product of the
                integers is not the number of logical devices.
            NotImplementedError: If a replica has several logical devices.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> x = np.ones((2, 3))
        >>> strategy.experimental_split_to_logical_devices(x, [1, 1]) is x
        True
        """
        self._check_split(tensor, partition_dimensions)
        return self._unmoved(tensor)

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> Any:
        """Keeps a copy of a tensor on each logical device of the replica.

        Args:
            tensor: Tensor to copy.

        Returns:
            The tensor, with the same value.

        Raises:
            NotImplementedError: If a replica has several logical devices.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.experimental_replicate_to_logical_devices(1.5)
        1.5
        """
        return self._unmoved(tensor)

    @property
    def _num_logical_devices(self) -> int:
        return len(self.plan.replicas[0])

    def _unmoved(self, tensor: Any) -> Any:
        count = self._num_logical_devices
        if count > 1:
            raise NotImplementedError(
                "A tensor can't be spread over several logical devices yet. "
                f"Received: {self!r}, whose replicas have {count} each. "
                "Expected: a plan with one logical device a replica."
            )
        return tensor

    def _check_split(self, tensor: Any, dimensions: Any) -> None:
        shape = tuple(getattr(tensor, "shape", np.shape(tensor)))
        received = (
            f"Received: partition_dimensions={dimensions!r} for a tensor of "
            f"shape {shape}."
        )
        if not isinstance(dimensions, (list, tuple)) or not all(
            isinstance(each, (int, np.integer)) and each > 0
            for each in dimensions
        ):
            raise ValueError(
                "`partition_dimensions` must be a list of positive integers. "
                f"{received}"
            )
        if len(dimensions) != len(shape):
            raise ValueError(
                "`partition_dimensions` must have as many elements as the "
                f"tensor has axes, {len(shape)}. {received}"
            )
        for axis, (size, parts) in enumerate(
            zip(shape, dimensions, strict=True)
        ):
            if size is not None and size % parts:
                raise ValueError(
                    "`partition_dimensions` must divide the tensor: axis "
                    f"{axis} of size {size} can't be split into {parts}. "
                    f"{received}"
                )
        count = self._num_logical_devices
        if np.prod(dimensions, dtype=int) != count:
            raise ValueError(
                "The product of `partition_dimensions` must be the number of "
                f"logical devices of a replica, {count}. {received}"
            )


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
        self, name: str, output: Any, reduce_op: ReduceOp | str | None = None
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

    def set_non_tensor_output(self, name: str, output: Any) -> None:
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
